"""`TrainingArguments`: every documented setting, checked on construction."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hftrain.arguments.enums import (
    FOLLOW_METRIC,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from hftrain.arguments.fields import ArgumentFields
from hftrain.arguments.normalize import apply_renames, convert_choices, current_optimizer, normalize
from hftrain.arguments.options import setting
from hftrain.arguments.processes import ArgumentProcesses
from hftrain.arguments.rules import check_combinations, check_kinds, check_values
from hftrain.core.errors import UnknownArgumentError
from hftrain.core.extras import extra

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


if TYPE_CHECKING:
    from typing_extensions import Self

_TWINS = {
    f"{first}_checkpointing{end}": f"{second}_checkpointing{end}"
    for first, second in (("gradient", "activation"), ("activation", "gradient"))
    for end in ("", "_kwargs")
}


class _InitSignature:
    """The signature of `__init__`; editors and `inspect` would show that of `__new__`."""

    def __get__(self, instance: object, owner: type) -> inspect.Signature:
        signature = inspect.signature(owner.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


@dataclass(repr=False)
class TrainingArguments(ArgumentSetters, ArgumentProcesses):
    """All settings of a run: a dataclass that checks its values on construction.

    Construction reads no file, environment variable or device, except to expand "~" in `output_dir` or `logging_dir`.
    Omitted settings that follow from others are filled in. `dataclasses.replace` copies the filled-in values, so pass
    them again if the settings they follow from change.

    Each setting is described where it is declared: the classes in `hftrain.arguments.fields` group them by concern.
    Numbers of steps or epochs may be texts with a unit: ``"10ep"``, ``"500ba"``, ``"0.1dur"``, ``"1e9tok"``, ``"2h"``.

    Args:
        output_dir: Folder for checkpoints and predictions. Every other setting is given by name.

    Raises:
        ConfigError: A name is unknown, a value is invalid, or two settings contradict each other.

    Source: the documented `TrainingArguments`.

    Example:
        >>> args = TrainingArguments("working_dir", eval_strategy="steps", logging_steps=50)
        >>> args.eval_steps, args.do_eval
        (50, True)
        >>> args.set_save(strategy="steps", steps=100).save_steps
        100
    """

    __signature__ = _InitSignature()

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if len(args) > 1 and cls.__init__ is TrainingArguments.__init__:
            raise UnknownArgumentError(
                f"Cannot pass {len(args)} positional arguments to {cls.__name__}:",
                "only output_dir may be one.",
                "Name the others: TrainingArguments('out', learning_rate=5e-5, ...).",
            )
        _refuse_unknown_names(cls, kwargs)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        resolve(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Two names of one setting always have the same value; assigning None to the newer one changes nothing.
        twin = _TWINS.get(name)
        if twin is not None:
            value = vars(self).get(twin) if value is None and name.startswith("activation") else value
            super().__setattr__(twin, value)
        super().__setattr__(name, value)


def _refuse_unknown_names(cls: type, given: dict[str, Any]) -> None:
    known = _accepted_names(cls)
    for name in given:
        if known is not None and name not in known:
            asked = f"Cannot set {name} in {cls.__name__}: there is no such setting."
            raise UnknownArgumentError(asked, "", extra("mistakes").answer_setting(name, known))


@functools.cache
def _accepted_names(cls: type) -> frozenset[str] | None:
    """Return the names that the class's `__init__` accepts, None if it accepts any."""
    parameters = list(inspect.signature(cls).parameters.values())
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def resolve(args: ArgumentFields) -> None:
    """Convert arguments to their normal forms, fill in implied values, and check all; mutates them.

    Idempotent, so it may be called again after attributes were assigned.
    """
    check_kinds(args)
    normalize(args)
    apply_renames(args)
    convert_choices(args)
    _derive(args)
    check_values(args)
    check_combinations(args)


def _derive(args: ArgumentFields) -> None:
    """Fill in omitted settings that others imply; idempotent."""
    if args.run_name is None:
        args.run_name = args.output_dir
    if args.use_cpu:
        args.dataloader_pin_memory = False
    if args.eval_strategy != IntervalStrategy.NO:
        args.do_eval = True
    if args.eval_strategy == IntervalStrategy.STEPS and args.eval_steps is None:
        args.eval_steps = args.logging_steps
    for name in ("logging_steps", "eval_steps", "save_steps"):
        value = getattr(args, name)
        # Fractions below 1 are shares of the run, and stay.
        if isinstance(value, float) and value >= 1 and value.is_integer():
            setattr(args, name, int(value))
    if args.save_total_limit in (0, -1):
        args.save_total_limit = None
    if args.save_steps == -1 and args.save_strategy == SaveStrategy.STEPS:
        args.save_strategy = SaveStrategy.NO
    needs_metric = args.load_best_model_at_end or args.lr_scheduler_type in FOLLOW_METRIC
    if needs_metric and args.metric_for_best_model is None:
        args.metric_for_best_model = "loss"
    if args.greater_is_better is None and args.metric_for_best_model is not None:
        args.greater_is_better = not args.metric_for_best_model.endswith("loss")
    if args.torch_compile_backend is not None or args.torch_compile_mode is not None:
        args.torch_compile = True
    if args.torch_compile and args.torch_compile_backend is None:
        args.torch_compile_backend = "inductor"


@dataclass(kw_only=True, repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """All settings of a sequence-to-sequence run.

    Source: the documented `Seq2SeqTrainingArguments`.

    Example:
        >>> Seq2SeqTrainingArguments("working_dir", predict_with_generate=True).predict_with_generate
        True
    """

    sortish_sampler: bool = setting(False, "Put samples of similar length together, with some randomness.")
    predict_with_generate: bool = setting(False, "Evaluate and predict with the model's generate method.")
    generation_max_length: int | None = setting(
        None, "Maximum length of generated sequences. Defaults to the model's max_length."
    )
    generation_num_beams: int | None = setting(None, "Number of beams. Defaults to the model's num_beams.")
    generation_config: str | Path | Any | None = setting(
        None, "A GenerationConfig, or the Hub name or folder to load one from."
    )
