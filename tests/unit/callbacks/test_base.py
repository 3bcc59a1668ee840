from __future__ import annotations

import json
import pickle

import pytest

from hftrain.callbacks import EarlyStoppingCallback, ExportableState, TrainerCallback
from hftrain.core.events import EVENTS
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState


def test_trainer_callback_has_a_method_for_every_event() -> None:
    assert [name for name in vars(TrainerCallback) if name.startswith("on_")] == list(EVENTS)


@pytest.mark.parametrize("event", EVENTS)
def test_trainer_callback_asks_for_nothing_by_default(event: str) -> None:
    control = TrainerControl()
    assert getattr(TrainerCallback(), event)(None, TrainerState(), control, metrics={}, logs={}) is None
    assert control == TrainerControl()


@pytest.mark.parametrize("carry", [lambda s: json.loads(json.dumps(s)), lambda s: pickle.loads(pickle.dumps(s))])
def test_exportable_state_survives_a_file(carry) -> None:
    callback = EarlyStoppingCallback(early_stopping_patience=4, early_stopping_threshold=0.5)
    callback.early_stopping_patience_counter = 3
    restored = EarlyStoppingCallback.from_state(carry(callback.state()))
    assert restored.state() == callback.state()
    assert restored.early_stopping_patience_counter == 3


def test_exportable_state_must_be_defined() -> None:
    class Forgot(TrainerCallback, ExportableState):
        pass

    with pytest.raises(NotImplementedError, match="Forgot must define"):
        Forgot().state()
