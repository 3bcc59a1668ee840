from __future__ import annotations

import pytest

from hftrain.callbacks import TrainerCallback
from hftrain.core.events import EVENTS
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState


@pytest.mark.parametrize("event", EVENTS)
def test_trainer_callback_asks_for_nothing_by_default(event: str) -> None:
    control = TrainerControl()
    assert getattr(TrainerCallback(), event)(None, TrainerState(), control, metrics={}, logs={}) is None
    assert control == TrainerControl()
