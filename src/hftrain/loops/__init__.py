"""Loops: control flow only, without access to a Trainer, a backend's name or training arguments.

The public module `hftrain.loops` holds the classes of loops and the functions of their registry, such as `register`.
"""

from hftrain.loops.contract import Loop, loops
from hftrain.loops.evaluate import EvaluateConfig, EvaluateHooks, EvaluateLoop, EvaluateParts, PredictLoop
from hftrain.loops.fit import FitConfig, FitHooks, FitLoop, FitParts

__all__ = [
    "EvaluateConfig",
    "EvaluateHooks",
    "EvaluateLoop",
    "EvaluateParts",
    "FitConfig",
    "FitHooks",
    "FitLoop",
    "FitParts",
    "Loop",
    "PredictLoop",
    "create",
    "names",
    "register",
    "resolve",
    "summary",
]

register, names, summary = loops.register, loops.names, loops.summary
resolve, create = loops.resolve, loops.create
