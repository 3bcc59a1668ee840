"""Fixtures of the Hub's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.hub_server import HubServer, running_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub on the loopback that huggingface_hub talks to, logged in as alice."""
    with running_hub(monkeypatch) as server:
        yield server
