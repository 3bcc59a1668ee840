"""accelerate's process-wide states, which its public API cannot read without creating them."""

from __future__ import annotations

import sys
from typing import Any


def accelerate_state(name: str) -> dict[str, Any]:
    """Return a state's dict (of ``"PartialState"``, say), empty before it is created; clear it to allow a new one."""
    module = sys.modules.get("accelerate.state")
    held: dict[str, Any] = {} if module is None else getattr(module, name)._shared_state
    return held


def tell_accelerate_sync(accelerator: Any, syncs: bool) -> None:
    """Tell an `accelerate.Accelerator` whether this micro-step is the last one before an update."""
    from accelerate.state import GradientState

    # The accelerator's own state, and the shared one that prepared optimizers read.
    for state in (accelerator.gradient_state, GradientState()):
        state._set_sync_gradients(syncs)
