"""`hftrain fit`: a training from a YAML file whose keys are checked against signatures, with overrides as options."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Literal, Union

from hftrain.arguments.normalize import LENGTHS
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks import TrainerCallback
from hftrain.cli.answer import Answer
from hftrain.core.elsewhere import names_elsewhere
from hftrain.core.errors import ConfigError, suggest
from hftrain.core.extras import require
from hftrain.core.seed import set_seed
from hftrain.core.state import TrainerControl, TrainerState
from hftrain.precision.base import Precision
from hftrain.storage.files import local_folder, write_text
from hftrain.strategies.base import Strategy
from hftrain.trainer.trainer import Trainer

CONFIG = "config.yaml"
_USAGE = "%(prog)s [FILE] [--from RUN] [--print-config] [--print-schema] [--json] [--SECTION.KEY VALUE ...]"
_ABOUT = (
    "Train as a YAML file says. --task.width 64 overrides task.init_args.width, --args.learning_rate 3e-4 a training "
    "argument. --from RUN repeats a run. --print-config prints the whole configuration, and --print-schema a JSON "
    "Schema with which editors complete and check the file."
)


def fit(
    task: Callable[..., Any] | None = None,
    data: Callable[..., Mapping[str, Any]] | None = None,
    *,
    argv: Sequence[str] | None = None,
) -> Trainer:
    """Train as a YAML file and command-line options say.

    The file has the sections ``task`` and ``data`` (a ``class_path``, and ``init_args`` that its signature allows),
    ``args`` (of `TrainingArguments`), ``callbacks``, ``strategy`` and ``precision``. Random numbers are seeded with
    ``args.seed`` before the task is made. The configuration, with every default, is written to ``config.yaml`` in the
    output folder.

    Args:
        task: Makes the task or model, if the file names none.
        data: Returns keyword arguments of the Trainer, such as ``{"train_dataset": ...}``, if the file names none.
        argv: The file, if any, and options as ``hftrain fit`` takes them; None takes those of the process.

    Returns:
        The Trainer, after its training.

    Raises:
        ConfigError: A key is unknown, a value has the wrong type, or the task is missing; names the key and its line.
        MissingDependencyError: jsonargparse is not installed.

    Example:
        >>> fit(MyTask, my_data)  # in train.py: python train.py run.yaml --task.width 64  # doctest: +SKIP
    """
    config = _Config(sys.argv[1:] if argv is None else argv, {"task": task, "data": data})
    if (answer := config.print_requested()) is not None:
        print("\n".join(answer))
        raise SystemExit(0)
    return config.train()


def show_fit(arguments: Sequence[str]) -> Answer:
    """Do what ``hftrain fit`` is asked for; see `fit`."""
    # Finds classes in files of the working directory, as `python -m` does.
    sys.path[:0] = [] if "" in sys.path else [""]
    config = _Config(arguments, {"task": None, "data": None})
    if (answer := config.print_requested()) is not None:
        return answer
    trainer = config.train()
    step, folder = trainer.state.global_step, str(trainer.args.output_dir)
    last_values = {name: value for entry in trainer.state.log_history for name, value in entry.items()}
    lines = [f"Trained to step {step}. Repeat it with: hftrain fit --from {folder} --args.output_dir OTHER"]
    lines_shown = lines if trainer.is_world_process_zero() else ()
    return Answer(lines_shown, {"output_dir": folder, "step": step, "last": last_values})


class _Config:
    """A configuration: that of a file or a run, then the options; `makers` are used for what neither names."""

    def __init__(self, argv: Sequence[str], makers: Mapping[str, Any]) -> None:
        require("jsonargparse>=4.53", feature="hftrain fit", extra="config")
        flags = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        flags.add_argument("--from", dest="run")
        flags.add_argument("--print-config", action="store_true")
        flags.add_argument("--print-schema", action="store_true")
        name = argv[0] if argv and not argv[0].startswith("-") else None
        self._flags, options = flags.parse_known_args(argv[1:] if name else argv)
        if name and self._flags.run:
            raise ConfigError(f"Cannot use {name!r} and --from.", "Both hold a whole configuration.", "Keep one.")
        self._file = YamlFile(_config_of(self._flags.run) if self._flags.run else name)
        # --task.width is short for --task.init_args.width.
        short_form = re.compile(rf"^--({'|'.join(makers)})\.(?!class_path\b|init_args\b)")
        self._options = [short_form.sub(r"--\1.init_args.", option) for option in options]
        self._makers = {part: self._find_maker(part, maker) for part, maker in makers.items()}
        self._parser = _make_parser(self._makers)
        self._check_known()
        self._parsed = self._parse()

    def print_requested(self) -> Answer | None:
        """Return what is to be printed, None if a training is asked for."""
        if self._flags.print_schema:
            schema = json.loads(self._parser.get_completion_script("jsonschema"))
            # shtab's option is no key, and options may give what a file leaves out.
            schema["properties"].pop("print_shtab", None)
            schema.pop("required", None)
            return Answer(json.dumps(schema, indent=2).splitlines(), schema)
        return Answer(to_yaml(self._values()).splitlines(), self._values()) if self._flags.print_config else None

    def train(self) -> Trainer:
        if self._makers["task"] is None:
            remedy = "Write task.class_path into the file, or add --task.class_path package.module.Name."
            raise ConfigError("Cannot train.", "The configuration names no task.", remedy)
        args = self._arguments()
        set_seed(args.seed)
        parts = self._parser.instantiate(self._parsed)
        settings = {part: vars(parts[part].get("init_args", argparse.Namespace())) for part in self._makers}
        task, data = (maker and maker(**settings[part]) for part, maker in self._makers.items())
        if not isinstance(data or {}, Mapping):
            remedy = 'Return a dict, such as {"train_dataset": dataset}.'
            raise ConfigError("Cannot use the data.", f"Its maker returned a {type(data).__name__}.", remedy)
        callbacks = [*parts.callbacks, _ConfigWriter(self._values())]
        options = {"strategy": parts.strategy, "precision": parts.precision, **(data or {})}
        trainer = Trainer(task, args, callbacks=callbacks, **options)
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
        return trainer

    def _arguments(self) -> TrainingArguments:
        """Return the training arguments; an error in them names the lines of the file that set them."""
        try:
            args = TrainingArguments(**vars(self._parsed.args))
        except ConfigError as error:
            keys = [key for key in self._file if key.startswith("args.") and re.search(rf"\b{key[5:]}\b", str(error))]
            raise ConfigError(": ".join([*map(self._file.at, keys), str(error)])) from error
        run = Path(self._flags.run or "")
        folder = local_folder(str(args.output_dir), start=Path.cwd()).resolve()
        if self._flags.run and not args.resume_from_checkpoint and folder in (run.resolve(), run.resolve().parent):
            raise ConfigError(
                f"Cannot repeat {self._flags.run!r} in its own folder:",
                "its checkpoints would be replaced.",
                "Add --args.output_dir OTHER, or --args.resume_from_checkpoint auto to continue it.",
            )
        return args

    def _values(self) -> dict[str, Any]:
        """Return the configuration with all defaults, as plain values; without tokens, and where this run resumes."""
        values: dict[str, Any] = json.loads(self._parser.dump(self._parsed, format="json", skip_unset=False))
        args = {name: value for name, value in values["args"].items() if not name.endswith("_token")}
        resume = "auto" if args["resume_from_checkpoint"] == "auto" else None
        values["args"] = {**args, "resume_from_checkpoint": resume}
        return {name: value for name, value in values.items() if self._makers.get(name, value) is not None}

    def _find_maker(self, part: str, default: Any) -> Any:
        """Return the class or function of a section; None if nothing names it."""
        section, key = self._file.values.get(part), f"{part}.class_path"
        path, place = section.get("class_path") if isinstance(section, dict) else None, self._file.at(key)
        option_words = [word for option in self._options for word in option.split("=", 1)]
        if f"--{key}" in option_words[:-1]:
            path, place = option_words[option_words.index(f"--{key}") + 1], f"--{key}"
        if path is None or (default is not None and path == _path_of(default)):
            return default
        try:
            return resolve_name(path)
        except (ImportError, AttributeError, ValueError) as error:
            remedy = "Write package.module.Name of a class or function that can be imported from here."
            remedy = "It is in a script: give these options to the script." if "__main__" in path else remedy
            raise ConfigError(f"{place}: cannot import {path!r}.", f"{error}.", remedy) from error

    def _check_known(self) -> None:
        """Raise for what nothing reads, with its line and the nearest name: jsonargparse would tell neither."""
        known = set(self._parser.get_defaults(skip_validation=True).keys()) - {"file"}
        sections = {dest[:position] for dest in known for position, letter in enumerate(dest) if letter == "."}
        for key in self._file:
            if ("." not in key or key.rpartition(".")[0] in sections) and key not in known | sections:
                raise ConfigError(f"{self._file.at(key)}: it has no meaning.", "", _suggest_key(key, known | sections))
        for option in self._options:
            key = option.partition("=")[0].removeprefix("--").rstrip("+")
            is_nested = any(key.startswith(f"{dest}.") for dest in known - sections)
            if option.startswith("--") and key not in known | {"help"} and not is_nested:
                raise ConfigError(f"Cannot use --{key}: it has no meaning.", "", _suggest_key(key, known | sections))

    def _parse(self) -> Any:
        """Parse the file and the options together; an error says which of the two is wrong."""
        try:
            return self._parser.parse_args(["--file", json.dumps(self._file.values), *self._options])
        except argparse.ArgumentError as error:
            text = " ".join(str(error).split())
            match = re.match(r'Parser key "([\w.]+)": ?', text)
            key = match[1] if match else ""
            origins = [self._file.at(key)] if key in self._file else []
            origins += [f"--{key}"] if any(re.match(rf"--{key}\b", option) for option in self._options) else []
            raise ConfigError(f"{' or '.join(origins)}: {text[match.end() if match else 0 :]}.") from error


class _ConfigWriter(TrainerCallback):
    """Write the configuration into the output folder when training begins; a resume replaces it by its own."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._text = to_yaml(values)
        self.run_config = {name: values[name] for name in ("task", "data") if name in values}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = local_folder(args.output_dir, start=Path.cwd())
            folder.mkdir(parents=True, exist_ok=True)
            write_text(folder / CONFIG, self._text)


def _make_parser(makers: Mapping[str, Any]) -> Any:
    import jsonargparse

    settings: Any = {"usage": _USAGE, "description": _ABOUT, "exit_on_error": False, "print_config": None}
    parser = jsonargparse.ArgumentParser("hftrain fit", **settings)
    parser.add_argument("--file", action="config", help=argparse.SUPPRESS)
    for section, maker in makers.items():  # whose arguments may lack annotations
        parser.add_argument(f"--{section}.class_path", type=str | None, default=maker and _path_of(maker))
        if inspect.isclass(maker):
            parser.add_class_arguments(maker, f"{section}.init_args", instantiate=False, fail_untyped=False)
        elif maker is not None:
            parser.add_function_arguments(maker, f"{section}.init_args", fail_untyped=False)
    group, hints = parser.add_argument_group("training arguments"), typing.get_type_hints(TrainingArguments)
    for field in dataclasses.fields(TrainingArguments):
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        hint = _with_enum_values(hints[field.name])
        hint = hint | str if field.name in LENGTHS else hint  # such as "2ep"
        group.add_argument(f"--args.{field.name}", type=hint, default=default, help=field.metadata["help"])
    callbacks_help = "Each a class_path and init_args."
    parser.add_argument("--callbacks", type=list[TrainerCallback], default=[], help=callbacks_help)
    for name, base in (("strategy", Strategy), ("precision", Precision)):
        parser.add_argument(f"--{name}", type=base | str | None, help="A name, or class_path and init_args.")
    return parser


def _with_enum_values(hint: Any) -> Any:
    """Return a type in which the values of enums stand for their members, as people write them."""
    enums = {kind for kind in typing.get_args(hint) if inspect.isclass(kind) and issubclass(kind, Enum)}
    kinds = typing.get_args(hint)
    kinds = tuple(Literal[tuple(member.value for member in kind)] if kind in enums else kind for kind in kinds)
    return Union[kinds] if enums else hint  # noqa: UP007


def _path_of(maker: Any) -> str:
    return f"{maker.__module__}.{maker.__qualname__}"


def _suggest_key(key: str, known: set[str]) -> str:
    siblings = [dest for dest in known if dest.rpartition(".")[0] == key.rpartition(".")[0]]
    siblings = siblings or [dest for dest in known if "." not in dest]  # of a section that does not exist
    section, _, name = key.rpartition(".")
    hint = suggest(f"{section}.{names_elsewhere('settings').get(name, name)}" if section == "args" else key, siblings)
    return hint if hint.startswith("Did") or len(siblings) < 20 else "See hftrain fit --help."


def _config_of(run: str) -> str:
    path = Path(run) if Path(run).is_file() else Path(run) / CONFIG
    if not path.is_file():
        reason = f"It holds no {CONFIG}, which 'hftrain fit' writes."
        raise ConfigError(f"Cannot repeat {run!r}.", reason, "Name the output_dir of a run that it has trained.")
    return str(path)


# What is not text, as patterns and first letters. PyYAML reads YAML 1.1, where 010 is 8 and 1:30 is 90.
_PLAIN_VALUES = {
    "bool": (r"[tT]rue|TRUE|[fF]alse|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    "float": (r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE])|\.inf)(?:[eE][-+]?[0-9]+)?|\.nan", "-+.0123456789"),
    "null": (r"~|[nN]ull|NULL|", ["~", "n", "N", ""]),
}


class YamlFile:
    """The content of a file, and where its keys are.

    Args:
        name: The file; None is one without keys.

    Raises:
        ConfigError: It does not exist, is no YAML, holds no mapping, or a key twice.
    """

    def __init__(self, name: str | None) -> None:
        import yaml

        self.values: Any = {}
        self._name, self._lines = name, dict[str, int]()
        if name is None:
            return
        try:
            loader = _dialect()[0](Path(name).read_text(encoding="utf-8"))
            node = loader.get_single_node()
            for key, line in _key_lines(node):
                if key in self._lines:
                    raise ConfigError(f"{name}, line {line}: {key} is in line {self._lines[key]} already.", "Keep one.")
                self._lines[key] = line
            self.values = {} if node is None else loader.construct_document(node)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"Cannot read {name!r}:", f"{' '.join(str(error).split())}.") from error
        if not isinstance(self.values, dict):
            raise ConfigError(f"Cannot use {name!r}.", "It holds no mapping.", "Write sections such as 'args:'.")

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def at(self, key: str) -> str:
        """Return where a key is, or the section that would hold it: ``run.yaml, line 8: args.learning_rate``."""
        section = key
        while section and section not in self._lines:
            section = section.rpartition(".")[0]
        return f"{self._name}, line {self._lines[section]}: {key}" if section else f"{self._name}: {key}"


def to_yaml(values: Any) -> str:
    """Return plain values as text that `YamlFile`, and readers of YAML 1.1, read as the same values."""
    import yaml

    return str(yaml.dump(values, Dumper=_dialect()[1], sort_keys=False, allow_unicode=True))


def _key_lines(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield the dotted keys below a node, and their lines from 1."""
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        yield f"{prefix}{key.value}", key.start_mark.line + 1
        yield from _key_lines(value, f"{prefix}{key.value}.")


@cache
def _dialect() -> tuple[Any, Any]:
    """Return a loader of YAML 1.2's plain values, and a dumper that quotes what either version reads otherwise."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {"<": yaml.SafeLoader.yaml_implicit_resolvers["<"]}

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    for kind, (pattern, first) in _PLAIN_VALUES.items():
        for dialect_class in (Loader, Dumper):
            dialect_class.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"(?:{pattern})$"), list(first))
    return Loader, Dumper
