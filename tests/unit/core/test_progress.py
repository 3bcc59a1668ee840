"""Where a run is, what callbacks ask, and when things are due."""

from __future__ import annotations

import dataclasses

from hftrain.core.state import TrainerControl


def test_control_is_stored_in_the_documented_form() -> None:
    control = TrainerControl(should_save=True)
    state = control.state()
    assert state == {"args": {f.name: f.name == "should_save" for f in dataclasses.fields(control)}, "attributes": {}}
    state["args"]["should_save"] = False
    assert control.should_save
