"""The log history in the checkpoints of a run: made once, and as it was at each save."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.tiny import train

from hftrain import SavePolicy, TrainerCallback
from hftrain.core import state as history_module


class Editing(TrainerCallback):
    """Change, remove and add entries, and note what the history was at each save."""

    def __init__(self) -> None:
        self.at_save: dict[int, list[dict[str, Any]]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            state.log_history[1]["loss"] = -1.0
        if state.global_step == 6:
            del state.log_history[0]
        if state.global_step == 7:
            state.log_history.append({"own": [1, 2]})

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.at_save.setdefault(state.global_step, [dict(each) for each in state.log_history])


@pytest.mark.parametrize("save_async", [False, True], ids=["waits", "async"])
def test_each_checkpoint_has_the_history_as_it_was(tmp_path, save_async) -> None:
    note = Editing()
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 9}
    train(tmp_path, None, note, save_policy=SavePolicy(save_async=save_async), **options)
    for step in range(1, 10):
        text = (tmp_path / f"checkpoint-{step}" / "trainer_state.json").read_text()
        content = json.loads(text)
        assert content["log_history"] == note.at_save[step]
        assert text == json.dumps(content, indent=2, sort_keys=True) + "\n"


@pytest.mark.parametrize("save_async", [False, True], ids=["waits", "async"])
def test_a_save_makes_the_text_of_what_was_logged_since_the_last(tmp_path, monkeypatch, save_async) -> None:
    made: list[Any] = []
    whole = history_module._text
    monkeypatch.setattr(history_module, "_text", lambda each: made.append(each["step"]) or whole(each))
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9}
    train(tmp_path, save_policy=SavePolicy(save_async=save_async), **options)
    assert made == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    made.clear()
    train(tmp_path, resume=True, **{**options, "max_steps": 12})
    assert made == [*range(1, 10), 10, 11, 12]
