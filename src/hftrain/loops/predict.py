"""Prediction: an evaluation that always keeps what the model said."""

from __future__ import annotations

import dataclasses

from hftrain.core.types import StepOutput
from hftrain.loops.evaluate import EvaluateConfig, EvaluateHooks, EvaluateLoop
from hftrain.loops.fit import Events
from hftrain.loops.gather import Group


class PredictLoop(EvaluateLoop):
    """Run every batch once and return the predictions in the data's order; the loss and metrics need labels."""

    def __init__(self, config: EvaluateConfig, *, hooks: EvaluateHooks, group: Group, events: Events) -> None:
        config = dataclasses.replace(config, keeps_predictions=True)
        super().__init__(config, hooks=hooks, group=group, events=events)

    def _tell(self, output: StepOutput) -> None:
        """Hand the batch's predictions to callbacks, too: some write them somewhere."""
        self.events.fire("on_prediction_step", outputs=output.outputs, labels=output.labels)
