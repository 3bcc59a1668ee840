"""Objects among predictions: plain data, whatever its nesting, there and back."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from hftrain.core.errors import TaskError
from hftrain.extras.predictions.objects import to_plain


@pytest.mark.parametrize("value", [object(), [{"a": {1, 2}}], numpy.array([object()], dtype=object)])
def test_anything_else_is_named(value: Any) -> None:
    with pytest.raises(TaskError, match=r"They hold a (object|set|ndarray), which cannot travel"):
        to_plain(value)
