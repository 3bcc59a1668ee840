"""The text of a log history: what json.dumps gives, and nothing made twice."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from hftrain.core import state as history_module
from hftrain.core.state import HistoryText, TrainerState


def dumped(state: TrainerState) -> str:
    return json.dumps(vars(state), indent=2, sort_keys=True) + "\n"


def entry(step: int) -> dict[str, Any]:
    return {"step": step, "loss": 1.0 / (step + 1), "epoch": step / 7}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The entries whose text was made so far."""
    seen: list[Any] = []
    whole = history_module._text
    monkeypatch.setattr(history_module, "_text", lambda each: seen.append(each) or whole(each))
    return seen


@pytest.mark.parametrize("seed", range(6))
def test_whatever_a_user_changes_comes_out(made: list[Any], seed: int) -> None:
    draw = random.Random(seed)
    state, history = TrainerState(), HistoryText()
    changes = [
        lambda log: log.pop(draw.randrange(len(log))),
        lambda log: log.clear(),
        lambda log: log.reverse(),
        lambda log: log.insert(draw.randrange(len(log)), {"new": [1]}),
        lambda log: log[draw.randrange(len(log))].update(loss=draw.random()),
        lambda log: log[draw.randrange(len(log))].setdefault("nested", []).append(draw.random()),
        lambda log: log[draw.randrange(len(log))].update(step=1.0),
        lambda log: log[draw.randrange(len(log))].update(step=True),
        lambda log: log[draw.randrange(len(log))].pop("step", None),
        lambda log: setattr(state, "log_history", [dict(each) for each in log]),
    ]
    for _ in range(60):
        state.log_history += [entry(len(state.log_history)) for _ in range(draw.randrange(1, 12))]
        if draw.random() < 0.6:
            draw.choice(changes)(state.log_history)
        history.take(state.log_history)
        assert "".join(state.json_parts(history)) == dumped(state)
    made.clear()
    history.take(state.log_history)
    assert "".join(state.json_parts(history)) == dumped(state)
    assert made == []


def test_an_entry_that_is_no_plain_data_is_refused_until_it_is_gone() -> None:
    state, history = TrainerState(log_history=[entry(0), {"loss": object()}]), HistoryText()
    for _ in range(2):
        history.take(state.log_history)
        with pytest.raises(TypeError, match="not JSON serializable"):
            history.parts()
    del state.log_history[1]
    history.take(state.log_history)
    assert "".join(state.json_parts(history)) == dumped(state)
