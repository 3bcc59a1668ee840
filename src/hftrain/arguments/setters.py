"""Settings by concern: methods that change several at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hftrain.arguments.enums import HubStrategy, IntervalStrategy, OptimizerNames, SaveStrategy, SchedulerType
from hftrain.arguments.fields import ArgumentFields
from hftrain.arguments.normalize import convert_choices, current_optimizer, normalize
from hftrain.arguments.rules import check_values

if TYPE_CHECKING:
    from typing_extensions import Self


# The settings of arguments that have another name.
_OF_EVALUATION = {
    "batch_size": "per_device_eval_batch_size",
    "loss_only": "prediction_loss_only",
    "jit_mode": "jit_mode_eval",
}
_OF_LOGGING = {
    "report_to": "report_to",
    "level": "log_level",
    "on_each_node": "log_on_each_node",
    "replica_level": "log_level_replica",
}
_OF_OPTIMIZER = {
    "name": "optim",
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "epsilon": "adam_epsilon",
    "args": "optim_args",
}
_OF_LOADING = {
    "train_batch_size": "per_device_train_batch_size",
    "eval_batch_size": "per_device_eval_batch_size",
    "auto_find_batch_size": "auto_find_batch_size",
    "ignore_data_skip": "ignore_data_skip",
    "sampler_seed": "data_seed",
}


class ArgumentSetters(ArgumentFields):
    """The documented `set_*` methods: each mutates the arguments and returns them, so that calls chain.

    A parameter means what the argument does that it sets, which `TrainingArguments` describes.

    Values are checked immediately, and an unknown name or a value out of range is a `ConfigError`. Combinations of
    settings are checked when a Trainer is constructed, because a chain may pass through invalid combinations.
    """

    def set_training(
        self,
        learning_rate: float = 5e-5,
        batch_size: int = 8,
        weight_decay: float = 0,
        num_epochs: float = 3,
        max_steps: int = -1,
        gradient_accumulation_steps: int = 1,
        seed: int = 42,
        gradient_checkpointing: bool = False,
    ) -> Self:
        """Set the main training settings; also sets `do_train`."""
        self.do_train = True
        return self._set(locals(), {"batch_size": "per_device_train_batch_size", "num_epochs": "num_train_epochs"})

    def set_evaluate(
        self,
        strategy: str | IntervalStrategy = "no",
        steps: int = 500,
        batch_size: int = 8,
        accumulation_steps: int | None = None,
        delay: float | None = None,
        loss_only: bool = False,
        jit_mode: bool = False,
    ) -> Self:
        """Set when and how to evaluate; also sets `do_eval` unless `strategy` is "no"."""
        self.do_eval = self.do_eval or IntervalStrategy(strategy) != IntervalStrategy.NO
        return self._set(locals(), _OF_EVALUATION, prefix="eval_")

    def set_testing(self, batch_size: int = 8, loss_only: bool = False, jit_mode: bool = False) -> Self:
        """Set how to predict on a test set; also sets `do_predict`."""
        self.do_predict = True
        return self._set(locals(), _OF_EVALUATION)

    def set_save(
        self,
        strategy: str | SaveStrategy | IntervalStrategy = "steps",
        steps: int = 500,
        total_limit: int | None = None,
        on_each_node: bool = False,
    ) -> Self:
        """Set when to save and how many checkpoints to keep."""
        return self._set(locals(), prefix="save_")

    def set_logging(
        self,
        strategy: str | IntervalStrategy = "steps",
        steps: int = 500,
        report_to: str | list[str] = "none",
        level: str = "passive",
        first_step: bool = False,
        nan_inf_filter: bool = False,
        on_each_node: bool = False,
        replica_level: str = "passive",
    ) -> Self:
        """Set what is logged, when and where; the defaults are those of the documented signature."""
        return self._set(locals(), _OF_LOGGING, prefix="logging_")

    def set_push_to_hub(
        self,
        model_id: str,
        strategy: str | HubStrategy = "every_save",
        token: str | None = None,
        private_repo: bool | None = None,
        always_push: bool = False,
        revision: str | None = None,
    ) -> Self:
        """Set what is pushed to the Hub; also sets `push_to_hub`."""
        self.push_to_hub = True
        return self._set(locals(), prefix="hub_")

    def set_optimizer(
        self,
        name: str | OptimizerNames = "adamw_torch",
        learning_rate: float = 5e-5,
        weight_decay: float = 0,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        args: str | None = None,
    ) -> Self:
        """Set the optimizer."""
        name = current_optimizer(name)
        return self._set(locals(), _OF_OPTIMIZER)

    def set_lr_scheduler(
        self,
        name: str | SchedulerType = "linear",
        num_epochs: float = 3.0,
        max_steps: int = -1,
        warmup_ratio: float = 0,
        warmup_steps: float = 0,
    ) -> Self:
        """Set the learning-rate schedule and the duration it spans."""
        return self._set(locals(), {"name": "lr_scheduler_type", "num_epochs": "num_train_epochs"})

    def set_dataloader(
        self,
        train_batch_size: int = 8,
        eval_batch_size: int = 8,
        drop_last: bool = False,
        num_workers: int = 0,
        pin_memory: bool = True,
        persistent_workers: bool = False,
        prefetch_factor: int | None = None,
        auto_find_batch_size: bool | str = False,
        ignore_data_skip: bool = False,
        sampler_seed: int | None = None,
    ) -> Self:
        """Set how batches are loaded."""
        return self._set(locals(), _OF_LOADING, prefix="dataloader_")

    def _set(self, values: dict[str, Any], names: Mapping[str, str] | None = None, *, prefix: str = "") -> Self:
        """Set what a method was given, by the names of the settings: those in `names`, else with the prefix."""
        for name, value in values.items():
            if name != "self":
                setattr(self, (names or {}).get(name, prefix + name), value)
        normalize(self)
        convert_choices(self)
        check_values(self)
        return self
