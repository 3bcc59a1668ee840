"""How many files of ours one batch, one save, one resume and one evaluation run through: who follows one reads them."""

from __future__ import annotations

import re

import pytest
from arch import house
from support.source import PACKAGE, ROOT


@pytest.fixture(scope="module")
def walks() -> dict[str, set[str]]:
    return house.walks()


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
def test_page_describes_the_walk(walks: dict[str, set[str]], name: str) -> None:
    assert sorted(described()[name] - walks[f"a {name}"]) == []
