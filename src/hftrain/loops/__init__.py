"""Control flow and nothing else: a loop never sees a Trainer, a backend's name or an argument."""

from hftrain.loops.evaluate import EvaluateConfig, EvaluateLoop
from hftrain.loops.fit import FitConfig, FitHooks, FitLoop, FitParts
from hftrain.loops.predict import PredictLoop

__all__ = ["EvaluateConfig", "EvaluateLoop", "FitConfig", "FitHooks", "FitLoop", "FitParts", "PredictLoop"]
