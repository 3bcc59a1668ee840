"""`hftrain estimate`: measure the memory of a script's training step instead of training."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hftrain.cli.answer import Answer
from hftrain.core.errors import ConfigError
from hftrain.trainer.estimating import MemoryEstimate
from hftrain.trainer.trainer import Trainer

T = TypeVar("T")


class _Reached(BaseException):
    """Ends the script when its training would begin; not an `Exception`, because the script may catch those."""


def show_estimate(script: str | Path, arguments: Sequence[str] = ()) -> Answer:
    """Return the lines that `hftrain estimate` prints; see `estimate_script`."""
    estimate = estimate_script(script, arguments)
    return Answer([str(estimate)], asdict(estimate))


def estimate_script(script: str | Path, arguments: Sequence[str] = ()) -> MemoryEstimate:
    """Run a script up to its first `train()`, and return the result of `Trainer.estimate_memory` there.

    Raises:
        ConfigError: There is no such file, or it ends without calling `train()`.
    """
    estimate: MemoryEstimate = at_training(script, arguments, lambda trainer: trainer.estimate_memory())
    return estimate


def at_training(script: str | Path, arguments: Sequence[str], act: Callable[[Any], T]) -> T:
    """Run a script up to its first `train()`, and return what `act` returns for its Trainer.

    Raises:
        ConfigError: There is no such file, or it ends without calling `train()`.
    """
    if not Path(script).is_file():
        reason = "There is no such file."
        raise ConfigError(f"Cannot estimate the memory of {str(script)!r}.", reason, "Check the path.")
    found: list[T] = []
    train, argv, path = Trainer.train, sys.argv, list(sys.path)

    def stand_in(trainer: Any, *args: Any, **kwargs: Any) -> NoReturn:
        Trainer.train = train  # type: ignore[method-assign]  # an estimate trains
        found.append(act(trainer))
        raise _Reached

    Trainer.train = stand_in  # type: ignore[method-assign, assignment]
    sys.argv, sys.path[:0] = [str(script), *arguments], [str(Path(script).resolve().parent)]
    try:
        # Output of the script and its rehearsal is not part of the estimate.
        with redirect_stdout(sys.stderr):
            runpy.run_path(str(script), run_name="__main__")
    except _Reached:
        pass
    finally:
        Trainer.train, sys.argv = train, argv  # type: ignore[method-assign]
        sys.path[:] = path
    if not found:
        raise ConfigError(
            f"Cannot estimate the memory of {str(script)!r}.",
            "The script ended without a call of Trainer.train.",
            "After its name, give the arguments with which it trains.",
        )
    return found[0]
