"""How far the parts of the package know each other, and its size: everything that has a ceiling."""

from __future__ import annotations

import pytest
from arch.ceilings import CEILINGS
from arch.house import circles, figures, takes_trainer, walks
from support.source import modules


@pytest.fixture(scope="module")
def measured() -> dict[str, int]:
    return figures(walks())


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
