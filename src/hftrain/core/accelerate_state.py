"""accelerate's process-wide states, which it has no public way to look at without making them."""

from __future__ import annotations

import sys
from typing import Any


def accelerate_state(name: str) -> dict[str, Any]:
    """Return what a state (``"PartialState"``) holds, empty while nothing made it; cleared, it can be made again."""
    module = sys.modules.get("accelerate.state")
    held: dict[str, Any] = {} if module is None else getattr(module, name)._shared_state
    return held


def tell_accelerate_sync(accelerator: Any, syncs: bool) -> None:
    """Tell an `accelerate.Accelerator` whether this micro-step is the last one before an update."""
    from accelerate.state import GradientState

    # Its own, and the shared one that prepared optimizers read.
    for state in (accelerator.gradient_state, GradientState()):
        state._set_sync_gradients(syncs)
