"""What the installed transformers has and hftrain lacks or has otherwise, each with the reason; more is drift.

When a new version brings a name, give it its place in hftrain: it acts, or it is refused with the reason. What is left
belongs into a table here and, if users can notice it, into docs/from_transformers.md or docs/design/contradictions.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from transformers import trainer_utils, training_args  # noqa: E402
from transformers.integrations import integration_utils  # noqa: E402

import hftrain  # noqa: E402
from hftrain.callbacks.base import TrainerCallback  # noqa: E402
from hftrain.core.elsewhere import names_elsewhere  # noqa: E402

pytestmark = pytest.mark.interop

ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments")
TRAINERS = ("Trainer", "Seq2SeqTrainer")

# Defaults of the documentation (4.57) that newer versions changed; see docs/design/contradictions.md.
DEFAULTS: dict[str, str] = {
    "fsdp": "'' in 4.57, None since 5: both mean no sharding",
    "gradient_checkpointing": "False in 4.57, None since 5, which ends up False",
    "include_num_input_tokens_seen": "False in 4.57, 'no' since 5: both count nothing",
    "lr_scheduler_kwargs": "{} in 4.57, None since 5: both are no options",
    "optim": "adamw_torch in 4.57's text, adamw_torch_fused since 4.54 with newer versions of torch",
    "report_to": "all installed trackers in 4.57, none since 5",
    "trackio_space_id": "'trackio' in 4.57, None since 5",
    "use_cache": "None switches the cache off while training and evaluating; transformers does so for good",
}

# What transformers' arguments have next to fields: steps of their construction, none of them documented.
ARGUMENT_NAMES = (
    "_apply_legacy_fsdp_to_config",
    "_dict_dtype_to_str",
    "_no_sync_in_gradient_accumulation",
    "_process_fsdp_args",
    "_validate_args",
    "default_optim",
    "is_torch_greater_or_equal_than_2_8",
)

# Public names of the Trainer that ours lacks.
TRAINER_NAMES: dict[str, str] = {
    "end": "leaked from a module",
    "load_generation_config": "ours reads generation_config when it generates",
    "loss_is_scaled_for_ga": "the loop weighs losses by what they are a mean over",
}

# Parameters that differ: ours have more defaults, which calls cannot notice, or another form.
SIGNATURES: dict[str, str] = {
    "_determine_best_metric": "a default more",
    "_evaluate": "defaults more",
    "_get_output_dir": "a default more",
    "_maybe_log_save_evaluate": "defaults more",
    "_save": "a default less: the loop always names the folder",
    "_save_checkpoint": "a default more",
    "predict": "without data, an error says which to pass",
    "get_batch_samples": "a default more",
    "metrics_format": "a method; there it is a function that happens to be an attribute of the class",
}


# Modules whose public names hftrain has, or answers with what to use.
MODULES = ("trainer_callback", "trainer_pt_utils", "trainer_utils", "training_args", "optimization")


def default(field: Any) -> Any:
    made = field.default is dataclasses.MISSING
    value = field.default_factory() if made else field.default
    return getattr(value, "value", value)


def fields(module: Any, cls: str) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(getattr(module, cls))}


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_every_setting_is_there(cls: str) -> None:
    assert fields(transformers, cls).keys() <= fields(hftrain, cls).keys()


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_defaults_are_the_same_but_for_the_known_ones(cls: str) -> None:
    ours, theirs = fields(hftrain, cls), fields(transformers, cls)
    differing = {name for name in theirs if default(ours[name]) != default(theirs[name])}
    assert differing == DEFAULTS.keys()


@pytest.mark.parametrize("cls", ARGUMENTS)
def test_names_of_the_arguments_are_there_but_for_the_known_ones(cls: str) -> None:
    missing = set(dir(getattr(transformers, cls))) - set(dir(getattr(hftrain, cls))) - fields(hftrain, cls).keys()
    assert {name for name in missing if not name.startswith("__")} <= set(ARGUMENT_NAMES)


@pytest.mark.parametrize("cls", TRAINERS)
def test_public_methods_of_the_trainer_are_there_but_for_the_known_ones(cls: str) -> None:
    missing = {name for name in dir(getattr(transformers, cls)) if not hasattr(getattr(hftrain, cls), name)}
    assert {name for name in missing if not name.startswith("_")} <= TRAINER_NAMES.keys()


def is_served(ours: Any, theirs: Any) -> bool:
    """Tell whether every call that fits their signature fits ours, with the same defaults."""
    mine, wanted = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    kwargs = inspect.Parameter.VAR_KEYWORD
    names = [name for name, parameter in wanted.items() if parameter.kind is not kwargs]
    same = all(name in mine and mine[name].default == wanted[name].default for name in names)
    return same and list(mine)[: len(names)] == names


@pytest.mark.parametrize("cls", TRAINERS)
def test_methods_have_the_same_parameters_but_for_the_known_ones(cls: str) -> None:
    ours, theirs = getattr(hftrain, cls), getattr(transformers, cls)
    shared = {
        name
        for name in dir(theirs)
        if not name.startswith("__") and callable(getattr(theirs, name)) and callable(getattr(ours, name, None))
    }
    differing = {name for name in {*shared, "__init__"} if not is_served(getattr(ours, name), getattr(theirs, name))}
    assert differing == SIGNATURES.keys()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (training_args, "OptimizerNames"),
        (training_args, "ParallelMode"),
        (trainer_utils, "FSDPOption"),
        (trainer_utils, "HPSearchBackend"),
        (trainer_utils, "HubStrategy"),
        (trainer_utils, "IntervalStrategy"),
        (trainer_utils, "SaveStrategy"),
        (trainer_utils, "SchedulerType"),
    ],
)
def test_every_choice_is_there(module: Any, name: str) -> None:
    theirs = {(choice.name, choice.value) for choice in getattr(module, name)}
    assert theirs <= {(choice.name, choice.value) for choice in getattr(hftrain, name)}


def test_every_event_and_callback_is_there() -> None:
    events = {name for name in dir(transformers.TrainerCallback) if name.startswith("on_")}
    assert events == {name for name in dir(TrainerCallback) if name.startswith("on_")}
    kinds = {name for name in dir(integration_utils) if name.endswith("Callback")}
    assert {name for name in kinds if name not in hftrain.__all__} == set()
    for name in ("CallbackHandler", "EarlyStoppingCallback", "ExportableState", "TrainerControl"):
        theirs = {each for each in dir(getattr(transformers.trainer_callback, name)) if not each.startswith("_")}
        assert theirs - set(dir(getattr(hftrain, name))) == set(), name


def test_state_and_control_have_the_same_fields() -> None:
    assert fields(transformers, "TrainerState").keys() <= fields(hftrain, "TrainerState").keys()
    assert fields(transformers, "TrainerControl").keys() <= vars(hftrain.TrainerControl()).keys()


@pytest.mark.parametrize("module", MODULES)
def test_names_of_a_module_are_there_or_answered_with_what_to_use(module: str) -> None:
    theirs = importlib.import_module(f"transformers.{module}")
    own = [name for name, value in vars(theirs).items() if getattr(value, "__module__", None) == theirs.__name__]
    names = [name for name in own if not name.startswith("_")]
    assert names
    assert [
        name for name in names if name not in names_elsewhere("transformers_names") and name not in dir(hftrain)
    ] == []
