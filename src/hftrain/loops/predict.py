"""Prediction: an evaluation that always keeps the model's outputs."""

from __future__ import annotations

import dataclasses

from hftrain.core.types import StepOutput
from hftrain.loops.evaluate import EvaluateLoop, EvaluateParts


class PredictLoop(EvaluateLoop):
    """Run every batch once and return the predictions in dataset order; loss and metrics require labels."""

    stage = "predict"

    def attach(self, parts: EvaluateParts) -> None:
        """Set the parts of a prediction before it starts."""
        config = dataclasses.replace(parts.config, keeps_predictions=True)
        super().attach(dataclasses.replace(parts, config=config))

    def _tell(self, output: StepOutput) -> None:
        """Also pass the batch's predictions to callbacks, such as writers."""
        self.parts.events.fire("on_prediction_step", outputs=output.outputs, labels=output.labels)
