"""Objects get all their attributes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hftrain.core.preserve import preserved, temporarily


class Checked:
    """Lets nobody set an attribute that it does not know."""

    def __init__(self, part: Any) -> None:
        self.counts, self.part, self.parts = {"a": [1]}, part, [part]

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in ("counts", "part", "parts", "more")
        super().__setattr__(name, value)


def test_attributes_that_were_set_changed_added_and_deleted_come_back() -> None:
    part: Callable[[], None] = lambda: None  # noqa: E731
    one, other = Checked(part), Checked(part)

    def change() -> None:
        with preserved(one, other, 3):
            one.counts["a"].append(2)
            one.counts["b"], one.part, one.more = [3], None, 1
            del other.counts
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        change()
    assert vars(one) == vars(other) == {"counts": {"a": [1]}, "part": part, "parts": [part]}
    assert one.parts is not other.parts


def test_attributes_that_are_set_for_a_while_come_back_after_an_error() -> None:
    checked = Checked(1)

    def change() -> None:
        with temporarily(checked, part=2, counts={}):
            assert (checked.part, checked.counts) == (2, {})
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        change()
    assert vars(checked) == {"counts": {"a": [1]}, "part": 1, "parts": [1]}
