"""Prediction: an evaluation that always keeps what the model said."""

from __future__ import annotations

import dataclasses

from hftrain.core.types import StepOutput
from hftrain.loops.evaluate import EvaluateLoop, EvaluateParts


class PredictLoop(EvaluateLoop):
    """Run every batch once and return the predictions in dataset order; loss and metrics require labels."""

    stage = "predict"

    def attach(self, parts: EvaluateParts) -> None:
        """Set the parts of a prediction before it begins."""
        config = dataclasses.replace(parts.config, keeps_predictions=True)
        super().attach(dataclasses.replace(parts, config=config))

    def _tell(self, output: StepOutput) -> None:
        """Hand the batch's predictions to callbacks, too: some write them somewhere."""
        self.parts.events.fire("on_prediction_step", outputs=output.outputs, labels=output.labels)
