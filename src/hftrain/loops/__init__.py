"""Control flow and nothing else: a loop never sees a Trainer, a backend's name or an argument.

The package is the public name `hftrain.loops`: it has the functions of the registry of loops, such as `register`, and
their classes.
"""

from hftrain.loops.contract import Loop
from hftrain.loops.evaluate import EvaluateConfig, EvaluateHooks, EvaluateLoop, EvaluateParts
from hftrain.loops.fit import FitConfig, FitHooks, FitLoop, FitParts
from hftrain.loops.predict import PredictLoop
from hftrain.loops.registry import loops

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
