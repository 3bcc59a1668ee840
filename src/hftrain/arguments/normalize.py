"""Convert settings that may be written in several forms: lists, JSON text, paths, choices."""

from __future__ import annotations

import json
import os
from enum import Enum
from typing import Any

from hftrain.arguments.accelerator import AcceleratorConfig
from hftrain.arguments.enums import (
    DebugOption,
    FSDPOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
)
from hftrain.arguments.fields import ArgumentFields
from hftrain.core.errors import ConfigError, suggest
from hftrain.core.lengths import read_length

# When to act, if the strategy of the same name is "steps".
INTERVALS = ("logging_steps", "eval_steps", "save_steps")
# What may be a text with a unit.
LENGTHS = ("num_train_epochs", "max_steps", "warmup_steps", *INTERVALS)
_LISTS = ("label_names", "include_for_metrics")
_WORDS = ("debug", "fsdp")
# Dict settings that may be the path of a file instead.
_JSON_OR_PATH = ("fsdp_config", "deepspeed", "accelerator_config")
_CHOICES: dict[str, type[Enum]] = {
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "hub_strategy": HubStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
}
_MEANT = dict.fromkeys(("adam", "adamw"), "Use 'adamw_torch'; with weight_decay=0, the default, it is Adam.")
_CHOICE_LISTS: dict[str, type[Enum]] = {"debug": DebugOption, "fsdp": FSDPOption}


def normalize(args: ArgumentFields) -> None:
    """Convert every setting except the choices to its normal form; mutates the arguments."""
    args.output_dir = _expand("trainer_output" if args.output_dir is None else args.output_dir)
    if args.logging_dir is not None:
        args.logging_dir = _expand(args.logging_dir)
    _normalize_lengths(args)
    _normalize_lists(args)
    _normalize_json(args)
    if args.eval_delay is None:
        args.eval_delay = 0
    if args.include_num_input_tokens_seen == "no":
        args.include_num_input_tokens_seen = False
    elif args.include_num_input_tokens_seen is True:
        args.include_num_input_tokens_seen = "all"


def convert_choices(args: ArgumentFields) -> None:
    """Convert the names of choices to members of their enums; mutates the arguments."""
    for name, choice in _CHOICES.items():
        setattr(args, name, _choose(choice, getattr(args, name), name))
    for name, choice in _CHOICE_LISTS.items():
        setattr(args, name, [_choose(choice, word, name) for word in getattr(args, name)])


def _choose(choice: type[Enum], value: Any, setting: str) -> Enum:
    """Return the member of a value; errors name the setting, not the enum."""
    try:
        return choice(value)
    except ConfigError:
        values = [str(member.value) for member in choice]
        remedy = _MEANT.get(str(value).lower()) or suggest(str(value), values)
        raise ConfigError(f"Cannot use {setting}={value!r}.", f"{setting} has no such value.", remedy) from None


def _normalize_lengths(args: ArgumentFields) -> None:
    """Convert texts such as "500ba" to numbers; the intervals that need the run to be known stay as they are."""
    for name in LENGTHS:
        length = read_length(getattr(args, name))
        if length is None:
            continue
        value, unit, is_duration = length.value, length.unit, name in ("num_train_epochs", "max_steps")
        if unit == "ba" and value.is_integer() and value < 2**53:
            setattr(args, name, int(value))
            if is_duration:
                args.num_train_epochs, args.max_steps = 3.0, int(value)
        elif unit == "ep" and is_duration:
            args.num_train_epochs = value
            args.max_steps = -1 if name == "max_steps" else args.max_steps
        elif unit == "dur" and not is_duration and value < 1:
            setattr(args, name, value)
        elif unit not in ("ep", "tok", "s") or name not in INTERVALS or (unit == "tok" and name == "logging_steps"):
            share = "" if is_duration else ", or a share of the run below 1 (0.1dur)"
            epochs = ", or epochs (10ep)" if is_duration or name in INTERVALS else ""
            raise ConfigError(
                f"Cannot use {name}={length.text!r}.",
                "It cannot be counted." if name in INTERVALS else "The schedule is planned in whole updates.",
                f"Write whole updates (500ba){share}{epochs}. To end a run early, pass max_time='2h' to the Trainer.",
            )


def _expand(path: str) -> str:
    """Return the path as text; the home folder is looked up only for a path that begins with '~'."""
    text = os.fspath(path)
    return os.path.expanduser(text) if text.startswith("~") else text


def _normalize_lists(args: ArgumentFields) -> None:
    fsdp: Any = args.fsdp
    if fsdp is True:
        args.fsdp = [FSDPOption.FULL_SHARD]
    elif isinstance(fsdp, str):
        # The spelling in the documentation's XLA chapter.
        args.fsdp = fsdp.replace("full shard", "full_shard")
    if args.include_for_metrics is None:
        args.include_for_metrics = []
    for name in _LISTS:
        value = getattr(args, name)
        setattr(args, name, [value] if isinstance(value, str) else value)
    for name in _WORDS:
        value = getattr(args, name) or []
        setattr(args, name, value.split() if isinstance(value, str) else list(value))
    args.report_to = _trackers(args.report_to)


def _trackers(value: str | list[str] | None) -> list[str] | None:
    if value is None:
        # Replaced by the Trainer, because the default depends on the installed trackers.
        return None
    trackers = [value] if isinstance(value, str) else list(value)
    if "none" not in trackers:
        return trackers
    if len(trackers) > 1:
        raise ConfigError(
            f"Cannot use report_to={trackers}.",
            "'none' turns all trackers off.",
            "Remove 'none', or the trackers.",
        )
    return []


def _normalize_json(args: ArgumentFields) -> None:
    fields = ArgumentFields._VALID_DICT_FIELDS
    for name in dict.fromkeys([*fields, *type(args)._VALID_DICT_FIELDS]):
        value = getattr(args, name)
        # A field that a subclass adds may be any text.
        is_json = name in fields and name not in _JSON_OR_PATH
        if isinstance(value, str) and (is_json or value.lstrip().startswith("{")):
            setattr(args, name, convert_texts(_parse(name, value)))
    if args.lr_scheduler_kwargs is None:
        args.lr_scheduler_kwargs = {}
    # The Trainer reads a path later, because building arguments reads no file.
    config: Any = args.accelerator_config
    if not isinstance(config, (str, os.PathLike)):
        config = AcceleratorConfig.from_settings(config)
    args.accelerator_config = config
    if isinstance(args.fsdp_config, dict):
        args.fsdp_config = strip_fsdp(args.fsdp_config)


def strip_fsdp(config: dict[str, Any]) -> dict[str, Any]:
    """Return `fsdp_config` without the prefix ``fsdp_`` of its keys, and with booleans in place of their texts."""
    settings: dict[str, Any] = {}
    for name, value in config.items():
        key, value = str(name).removeprefix("fsdp_"), _flag(value)
        if settings.setdefault(key, value) != value:
            raise ConfigError(
                f"Cannot use fsdp_config with both {key!r} and {'fsdp_' + key!r}.",
                f"They are one key, with the values {settings[key]!r} and {value!r}.",
                "Remove one of the two.",
            )
    return settings


def convert_texts(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert the texts of booleans and numbers in settings, at any depth.

    Example:
        >>> convert_texts({"a": "True", "b": {"c": "5"}, "d": "0.5", "e": "1-b"})
        {'a': True, 'b': {'c': 5}, 'd': 0.5, 'e': '1-b'}
    """
    return {name: _converted(value) for name, value in settings.items()}


def _converted(value: Any) -> Any:
    if isinstance(value, dict):
        return convert_texts(value)
    if not isinstance(value, str):
        return value
    if value.isdecimal():
        return int(value)
    return float(value) if value.replace(".", "", 1).isdecimal() else _flag(value)


def _parse(name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        value = error
    if not isinstance(value, dict):
        reason = f"It is not a JSON object ({value})."
        raise ConfigError(f"Cannot use {name}={text!r}.", reason, "Pass a dict, or text such as '{\"key\": 1}'.")
    return value


def _flag(value: Any) -> Any:
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
