"""The objects that own what a Trainer does, made in one place, and what they do for a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hftrain.core.extras import extra
from hftrain.core.signatures import Hooks
from hftrain.data.datasets import EvalSet
from hftrain.loops.window import LogWindow, LossWindow
from hftrain.run.journal import Journal
from hftrain.run.output import Output
from hftrain.run.parts import RunParts, TrainerHooks, TrainerServices, loss_window
from hftrain.step.stepper import StepCalls
from hftrain.trainer.activity import Activity
from hftrain.trainer.data import TrainerData
from hftrain.trainer.evaluation import Evaluation
from hftrain.trainer.model import TrainerModel, TrainerOptimizers
from hftrain.trainer.training_steps import TrainingSteps


class TrainerParts:
    """The parts of a Trainer, each with what it needs of the others.

    Attributes:
        memory: Measures the memory of each stage; None if the arguments do not ask for it.
        journal: That of the current or the last run.
        losses: The logging window of that run; scripts read the logged values after it.
        trial_run: The current trial of a search, with its results; None outside of one.
    """

    def __init__(
        self, trainer: TrainerHooks, hooks: Hooks, *, eval_sets: dict[str, EvalSet], on_adopted: Callable[[], None]
    ) -> None:
        self._trainer, self.hooks = trainer, hooks
        args, strategy, precision = trainer.args, trainer.strategy, trainer.precision
        self.memory: Any = None
        if not args.skip_memory_metrics:
            tracking, device_type = extra("memory"), strategy.device_type
            self.memory = tracking.MemoryTracker(is_on=True, is_main=strategy.is_main, device_type=device_type)
        self.computing = StepCalls(precision.backward, precision.autocast)
        self.output = Output(trainer, strategy)
        self.journal = Journal()
        self.losses: LossWindow | None = None
        self.trial_run: Any = None
        self.steps = TrainingSteps(trainer, hooks, self.computing)
        self.model = TrainerModel(trainer, hooks, self.steps, on_adopted=on_adopted)
        self.optimizers = TrainerOptimizers(trainer, hooks)
        self.activity = Activity(trainer, hooks, self.steps, self.memory)
        self.data = TrainerData(trainer, hooks)
        self.evaluation = Evaluation(trainer, hooks, self.activity, self.data, eval_sets)

    def for_run(self, ignore_keys: list[str] | None) -> RunParts:
        """Return the parts that exist before a run is built, which has a new journal and a new logging window."""
        trainer, steps, evaluation, activity = self._trainer, self.steps, self.evaluation, self.activity
        self.losses, self.journal = loss_window(trainer, self.hooks), Journal()
        services = TrainerServices(
            make_model=self.model.rebuild,
            outermost=self.model.model_to_wrap,
            open_data=self.data.training_share,
            forget_schedule=self.optimizers.forget,
            cast_model=steps.cast_model,
            begin_steps=steps.begin,
            end_steps=steps.end,
            step_functions=steps.functions,
            mark_sync=steps.mark_sync,
            check_cadences=evaluation.check_cadences,
            try_evaluation=evaluation.try_out,
            read_metrics=evaluation.read_metrics,
            report_memory=activity.report_memory,
            where=activity.whereabouts,
        )
        return RunParts(
            trainer=trainer,
            hooks=self.hooks,
            args=trainer.args,
            save_policy=trainer.save_policy,
            strategy=trainer.strategy,
            precision=trainer.precision,
            computing=self.computing,
            loops=trainer.loops,
            output=self.output,
            state=trainer.state,
            control=trainer.control,
            events=trainer.callback_handler,
            losses=self.losses,
            logs=LogWindow(gather_object=trainer.strategy.data.gather_object),
            trial_run=self.trial_run,
            ignore_keys=ignore_keys,
            journal=self.journal,
            services=services,
        )
