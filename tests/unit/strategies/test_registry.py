"""Strategies by name."""

from __future__ import annotations

import pytest

from hftrain.core.errors import ConfigError
from hftrain.strategies.registry import create_strategy


def test_unknown_option_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Received: bucket_cap_mb=25\."):
        create_strategy("single", use_cpu=True, bucket_cap_mb=25)
