"""How far the parts of the package know each other, and its size: everything that has a ceiling.

Also which files of ours one batch, one save, one resume and one evaluation run through: who follows one reads them.
"""

from __future__ import annotations

import re

import pytest
from arch.ceilings import CEILINGS
from arch.house import circles, figures, takes_trainer, walks
from support.source import PACKAGE, ROOT, modules


@pytest.fixture(scope="module")
def walked() -> dict[str, set[str]]:
    return walks()


@pytest.fixture(scope="module")
def measured(walked: dict[str, set[str]]) -> dict[str, int]:
    return figures(walked)


def test_no_modules_import_each_other() -> None:
    assert circles() == []


def test_nobody_is_given_a_trainer() -> None:
    assert [found for module in modules() for found in takes_trainer(module)] == []


@pytest.mark.parametrize("name", CEILINGS)
def test_figure_is_below_its_ceiling(measured: dict[str, int], name: str) -> None:
    assert 0 < measured[name] <= CEILINGS[name].now


@pytest.mark.parametrize("name", CEILINGS)
def test_ceiling_follows_what_is_taken_away(measured: dict[str, int], name: str) -> None:
    """One that hangs high would let in again what was taken away."""
    assert measured[name] >= 0.97 * CEILINGS[name].now


def described() -> dict[str, set[str]]:
    """Return the files that the page on the architecture names in each walk."""
    page = (ROOT / "docs/design/architecture.md").read_text("utf-8")
    found = re.findall(r"<!-- walk: (\w+) -->\n```text\n(.*?)```", page, re.DOTALL)
    return {name: set(re.findall(r"[\w/]+\.py", text)) for name, text in found}


def test_page_names_files_that_there_are() -> None:
    page = (ROOT / "docs/design/architecture.md").read_text("utf-8")
    inside = {name for name in re.findall(r"[\w/]+/[\w/]+\.py", page) if not name.startswith("docs/")}
    assert sorted(name for name in inside if not (PACKAGE / name).is_file()) == []


@pytest.mark.parametrize("name", ["step", "save", "resume"])
def test_page_describes_the_walk(walked: dict[str, set[str]], name: str) -> None:
    assert sorted(described()[name] - walked[f"a {name}"]) == []
