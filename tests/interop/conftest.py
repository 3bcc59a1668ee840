"""Fixtures for the tests against transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def environment_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Keep what transformers' Trainer sets for the whole process, once it has run, from outliving a test."""
    import transformers

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    level = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(level)
    transformers.logging.reset_format()
    if "bitsandbytes" in sys.modules:
        # It holds exceptions by the identity of a parameter, which a later one may get.
        sys.modules["bitsandbytes"].optim.GlobalOptimManager.get_instance().initialize()
