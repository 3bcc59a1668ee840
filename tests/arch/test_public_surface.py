"""The public names are a promise: none appears or goes by accident.

After a change on purpose, write the list anew and tell about it in CHANGELOG.md::

    python -c "import hftrain; print(*sorted(hftrain.__all__), sep='\\n')" > tests/arch/public_names.txt
"""

from __future__ import annotations

import inspect
from pathlib import Path

import hftrain

FROZEN = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").split()


def test_public_names_are_the_frozen_ones() -> None:
    assert sorted(hftrain.__all__) == FROZEN


def test_public_names_are_not_listed_twice() -> None:
    assert len(hftrain.__all__) == len(set(hftrain.__all__))


def test_public_names_exist_and_are_listed_by_dir() -> None:
    assert [name for name in hftrain.__all__ if not hasattr(hftrain, name)] == []
    assert set(hftrain.__all__) <= set(dir(hftrain))


def test_public_classes_and_functions_are_documented() -> None:
    public = [(name, getattr(hftrain, name)) for name in hftrain.__all__]
    assert [name for name, value in public if callable(value) and not inspect.getdoc(value)] == []
