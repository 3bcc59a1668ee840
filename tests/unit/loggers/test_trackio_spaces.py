"""What Trackio is asked for beyond the local database, with a stand-in: the real one would create Spaces on the Hub."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hftrain.loggers.base import RunFacts
from hftrain.loggers.trackio import TrackioLogger


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, []),
        ({"space_id": "me/live"}, []),
        ({"space_id": "me/live", "static_space_id": "me/still"}, ["freeze"]),
        ({"static_space_id": "me/still", "bucket_id": "me/data"}, ["sync"]),
    ],
)
def test_ended_run_is_put_into_the_static_space(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], expected: list[str]
) -> None:
    asked: dict[str, dict[str, Any]] = {}

    def init(**options: Any) -> Any:
        asked["init"] = options
        return SimpleNamespace(name="n", finish=lambda: None)

    stand_in = SimpleNamespace(
        init=init,
        freeze=lambda **options: asked.update(freeze=options),
        sync=lambda **options: asked.update(sync=options),
    )
    monkeypatch.setitem(sys.modules, "trackio", stand_in)
    logger = TrackioLogger()
    logger.start(RunFacts(name="n", project="p", **facts))
    logger.close()
    assert [name for name in asked if name != "init"] == expected
    assert asked["init"].get("bucket_id") == facts.get("bucket_id")
    for name in expected:
        assert "me/still" in asked[name].values()
