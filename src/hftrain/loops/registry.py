"""Loops by name, and the loops of a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hftrain.core.errors import ConfigError, TaskError, a_kind
from hftrain.core.extras import extra
from hftrain.core.registry import Registry
from hftrain.core.signatures import check_overrides
from hftrain.loops.contract import Loop
from hftrain.loops.evaluate import EvaluateLoop
from hftrain.loops.fit import FitLoop

loops: Registry[Loop[Any]] = Registry("loop", group="hftrain.loops", elsewhere={"train": "fit", "eval": "evaluate"})
loops.register("fit", "hftrain.loops.fit:FitLoop", summary="epochs of optimizer steps")
loops.register("evaluate", "hftrain.loops.evaluate:EvaluateLoop", summary="one pass that reduces to metrics")
loops.register("predict", "hftrain.loops.evaluate:PredictLoop", summary="one pass that keeps the predictions")

_BASES: dict[str, type[Loop[Any]]] = {"fit": FitLoop, "evaluate": EvaluateLoop, "predict": EvaluateLoop}


def create_loops(chosen: Any) -> dict[str, Loop[Any]]:
    """Return the chosen loops, by the stage that each runs.

    Args:
        chosen: A name, a class, an instance, or a sequence of those; None for none.

    Raises:
        ConfigError: A name is unknown, a class needs options, or two loops run the same stage.
        TaskError: A value is not a loop.
    """
    if chosen is None:
        return {}
    found: dict[str, Loop[Any]] = {}
    is_several = isinstance(chosen, Sequence) and not isinstance(chosen, str)
    for each in chosen if is_several else [chosen]:
        loop = _create(each)
        other = found.get(loop.stage)
        if other is not None:
            raise ConfigError(
                f"Cannot use {type(other).__name__} and {type(loop).__name__} in one Trainer:",
                f"both run the stage {loop.stage!r}.",
                "Pass one loop per stage.",
            )
        extra("own_loops").check_features(loop, {})
        found[loop.stage] = loop
    return found


def _create(chosen: Any) -> Loop[Any]:
    kind = loops.resolve(chosen)[0] if isinstance(chosen, str) else chosen
    try:
        loop: Any = loops.create(chosen) if isinstance(chosen, str) else kind() if isinstance(kind, type) else kind
    except TypeError as error:
        raise ConfigError(
            f"Cannot make the loop {kind.__name__}: {error}.",
            "A class or a name is called without arguments.",
            f"Pass an instance: loop={kind.__name__}(...).",
        ) from error
    base = _BASES.get(getattr(loop, "stage", ""))
    if base is None or not isinstance(loop, base):
        raise TaskError(
            f"Cannot use {a_kind(loop)} as a loop:",
            "it is not a loop." if base is None else f"it runs the stage {loop.stage!r} but is not a {base.__name__}.",
            f"Derive it from {base.__name__}."
            if base
            else "Pass a loop or a list of loops; derive your own from FitLoop, EvaluateLoop or PredictLoop.",
        )
    check_overrides(type(loop), base)
    return loop
