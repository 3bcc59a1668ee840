"""`HfArgumentParser`: build dataclasses from command lines, dicts and files."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hftrain.arguments.fields import ArgumentFields
from hftrain.arguments.normalize import LENGTHS
from hftrain.cli.options import is_flag, option_names, option_settings, or_length
from hftrain.core.errors import ConfigError, suggest
from hftrain.core.optional import require

_WORDS = re.compile(r"""(?P<quote>["'])(?P<quoted>.*?)(?P=quote)(?=\s|$)|(?P<plain>\S+)""", re.DOTALL)


class HfArgumentParser(argparse.ArgumentParser):
    """Create command-line options from dataclasses, and dataclasses from the parsed options.

    Every field becomes ``--its_name`` and ``--its-name``. Booleans are flags that may take a value (``--flag``,
    ``--flag 0``, ``--flag False``); one that is on by default also has ``--no_its_name``. Lists take several values,
    enums and literals take one of theirs, and dicts, tuples and sets are written as JSON text. A field without a
    default is required, except for booleans.

    Args:
        dataclass_types: One dataclass, or several that share no field.
        **kwargs: Passed to `argparse.ArgumentParser`.

    Raises:
        ConfigError: A type is not a dataclass, or an annotation uses a name that its module does not define.

    Source: the documented `HfArgumentParser`.

    Example:
        >>> from hftrain import TrainingArguments
        >>> parser = HfArgumentParser(TrainingArguments)
        >>> (args,) = parser.parse_args_into_dataclasses(["--output_dir", "out", "--log-on-each-node", "0"])
        >>> args.output_dir, args.log_on_each_node
        ('out', False)
    """

    def __init__(self, dataclass_types: type | Iterable[type] | None = None, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.ArgumentDefaultsHelpFormatter)
        super().__init__(**kwargs)
        types = [dataclass_types] if isinstance(dataclass_types, type) else dataclass_types or ()
        self.dataclass_types: list[Any] = list(types)
        for kind in self.dataclass_types:
            self._add_dataclass(kind)

    def _add_dataclass(self, kind: Any) -> None:
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            asked, reason = f"Cannot use HfArgumentParser({kind!r}).", "It is not a dataclass, so it has no fields."
            raise ConfigError(asked, reason, "Decorate the class with @dataclass, and give the class itself.")
        hints, title = _type_hints(kind), getattr(kind, "_argument_group_name", kind.__name__)
        group = self.add_argument_group(title)
        for field in _fields(kind):
            hint = hints[field.name]
            settings = option_settings(field, hint)
            if issubclass(kind, ArgumentFields) and field.name in LENGTHS:
                settings["type"] = or_length(settings["type"])
            group.add_argument(*option_names(field), **settings)
            if field.default is True and is_flag(hint):
                opposites = dict.fromkeys((f"--no_{field.name}", f"--no-{field.name.replace('_', '-')}"))
                more: Any = {"dest": field.name, "default": argparse.SUPPRESS, "help": field.metadata.get("help")}
                group.add_argument(*opposites, action="store_false", **more)

    def parse_args_into_dataclasses(
        self,
        args: Sequence[str] | None = None,
        return_remaining_strings: bool = False,
        look_for_args_file: bool = True,
        args_filename: str | os.PathLike[str] | None = None,
        args_file_flag: str | None = None,
    ) -> tuple[Any, ...]:
        """Parse a command line; its values take precedence over files of arguments.

        Args:
            args: The arguments; None takes those of the process.
            return_remaining_strings: Return unknown arguments as a list at the end, instead of raising.
            look_for_args_file: Read the file next to the script with the same name and the suffix ".args", if it
                exists.
            args_filename: A file of arguments to read instead, separated by white space; arguments with white space
                are quoted.
            args_file_flag: An option that names such files; may be given several times, and later files win.

        Returns:
            One object per dataclass, in order; then a namespace, if options were added to the parser; then the
            unknown arguments, if requested.

        Raises:
            ConfigError: An option is unknown, or a file does not exist.
            SystemExit: A value cannot be read, or a required option is missing; argparse's message is printed.

        Source: the documented `HfArgumentParser.parse_args_into_dataclasses`.
        """
        words = list(sys.argv[1:] if args is None else args)
        files = [] if args_filename is None else [Path(args_filename)]
        beside = Path(sys.argv[0]).with_suffix(".args") if sys.argv and Path(sys.argv[0]).name else None
        if look_for_args_file and not files and beside is not None and beside.is_file():
            files = [beside]
        if args_file_flag:
            named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
            named.add_argument(args_file_flag, dest="files", type=Path, action="append", default=[])
            found, words = named.parse_known_args(words)
            files += found.files
        words = [word for file in files for word in _read_words(file)] + words
        namespace, remaining = self.parse_known_args(words)
        outputs = self._build(vars(namespace))
        outputs += (namespace,) if vars(namespace) else ()
        if return_remaining_strings:
            return (*outputs, remaining)
        if remaining:
            self._refuse_unknown([word for word in remaining if word.startswith("-")] or remaining)
        return outputs

    def parse_dict(self, args: Mapping[str, Any], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Build the dataclasses from a mapping of field names; values are not converted.

        Args:
            args: The values.
            allow_extra_keys: Ignore names that no dataclass has, instead of raising.

        Raises:
            ConfigError: A name is unknown; close matches are listed.

        Source: the documented `HfArgumentParser.parse_dict`.
        """
        names = {field.name for kind in self.dataclass_types for field in _fields(kind)}
        unknown = [name for name in args if name not in names]
        if unknown and not allow_extra_keys:
            hints = " ".join(suggest(str(name), names) for name in unknown[:3])
            raise ConfigError(f"Cannot use the keys {unknown}.", "No dataclass has such fields.", hints)
        return self._build(dict(args))

    def parse_json_file(self, json_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Build the dataclasses from a JSON file; see `parse_dict`.

        Raises:
            ConfigError: The file does not contain a JSON object, or a name is unknown.

        Source: the documented `HfArgumentParser.parse_json_file`.
        """
        return self.parse_dict(_read_mapping(json_file, json.loads, "JSON object"), allow_extra_keys)

    def parse_yaml_file(self, yaml_file: str | os.PathLike[str], allow_extra_keys: bool = False) -> tuple[Any, ...]:
        """Build the dataclasses from a YAML file; see `parse_dict`.

        Raises:
            MissingDependencyError: PyYAML is not installed.
            ConfigError: The file does not contain a YAML mapping, or a name is unknown.

        Source: the documented `HfArgumentParser.parse_yaml_file`.
        """
        require("PyYAML", feature="parse_yaml_file()")
        import yaml

        return self.parse_dict(_read_mapping(yaml_file, yaml.safe_load, "YAML mapping"), allow_extra_keys)

    def _build(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Build the dataclasses; removes their fields from `values`."""
        return tuple(
            # Defaults must not be shared between two calls.
            kind(**{f.name: copy.deepcopy(values.pop(f.name)) for f in _fields(kind) if f.name in values})
            for kind in self.dataclass_types
        )

    def _refuse_unknown(self, words: list[str]) -> None:
        options = [name for name in self._option_string_actions if name.startswith("--") and "-" not in name[2:]]
        names = [word.partition("=")[0].replace("-", "_") for word in words[:3] if word.startswith("--")]
        hints = " ".join(suggest(name.replace("__", "--", 1), options) for name in names) or "Remove it."
        raise ConfigError(f"Cannot parse {' '.join(words)!r}.", "The parser knows no such options.", hints)


def _fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.init]


def _type_hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind)
    except NameError as error:
        raise ConfigError(
            f"Cannot use HfArgumentParser({kind.__name__}).",
            f"An annotation of its fields cannot be resolved: {error}.",
            "Define or import what annotations name at the top of the module, and not under TYPE_CHECKING.",
        ) from error


def _read_words(file: Path) -> list[str]:
    if not file.is_file():
        raise ConfigError(f"Cannot read arguments from {str(file)!r}.", "There is no such file.", "Check the path.")
    found = _WORDS.finditer(file.read_text(encoding="utf-8"))
    return [word["plain"] if word["quote"] is None else word["quoted"] for word in found]


def _read_mapping(file: str | os.PathLike[str], load: Callable[[str], Any], kind: str) -> dict[str, Any]:
    text = Path(file).read_text(encoding="utf-8")
    try:
        content = load(text)
    except Exception as error:
        content = error
    if not isinstance(content, dict):
        reason = f"It holds no {kind}: {content}."
        raise ConfigError(f"Cannot read {os.fspath(file)!r}.", reason, "Write one value per field's name.")
    return content
