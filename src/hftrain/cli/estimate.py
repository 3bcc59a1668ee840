"""`hftrain estimate`: a script's training, asked for its memory in place of being run."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hftrain.core.errors import ConfigError
from hftrain.trainer.estimating import MemoryEstimate
from hftrain.trainer.trainer import Trainer


class _Reached(BaseException):
    """Ends the script where its training would begin; no error, for the script may catch those."""


def estimate_script(script: str | Path, arguments: Sequence[str] = ()) -> MemoryEstimate:
    """Run a script up to its first `train()`, and return what `Trainer.estimate_memory` says there."""
    found: list[MemoryEstimate] = []
    train, argv, path = Trainer.train, sys.argv, list(sys.path)

    def stand_in(trainer: Any, *args: Any, **kwargs: Any) -> NoReturn:
        Trainer.train = train  # type: ignore[method-assign]  # the estimate trains
        found.append(trainer.estimate_memory())
        raise _Reached

    Trainer.train = stand_in  # type: ignore[method-assign, assignment]
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(Path(script).resolve().parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except _Reached:
        pass
    finally:
        Trainer.train, sys.argv = train, argv  # type: ignore[method-assign]
        sys.path[:] = path
    if not found:
        raise ConfigError(
            f"Cannot estimate the memory of {script}.",
            "The script ended without a call of Trainer.train.",
            "Give the arguments with which it trains after its name.",
        )
    return found[0]
