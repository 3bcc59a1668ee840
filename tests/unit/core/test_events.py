"""The names of events, and the pseudocode that shows where they come."""

from __future__ import annotations

import re

from hftrain import TrainerCallback
from hftrain.core import events


def test_every_event_is_a_method_of_the_callback_and_shown_in_the_loop() -> None:
    methods = {name for name in vars(TrainerCallback) if name.startswith("on_")}
    shown = set(re.findall(r"\bon_\w+", events.__doc__ or ""))
    assert len(set(events.EVENTS)) == len(events.EVENTS)
    assert methods == set(events.EVENTS) == shown
