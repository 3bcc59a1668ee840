"""Loops by name."""

from __future__ import annotations

from typing import Any

from hftrain.core.registry import Registry
from hftrain.loops.contract import Loop

loops: Registry[Loop[Any]] = Registry("loop", group="hftrain.loops", elsewhere={"train": "fit", "eval": "evaluate"})
loops.register("fit", "hftrain.loops.fit:FitLoop", summary="epochs of optimizer steps")
loops.register("evaluate", "hftrain.loops.evaluate:EvaluateLoop", summary="one pass that reduces to metrics")
loops.register("predict", "hftrain.loops.evaluate:PredictLoop", summary="one pass that keeps the predictions")
