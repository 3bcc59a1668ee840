from __future__ import annotations

import pytest

from hftrain.callbacks import TrainerCallback
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
