"""YAML files of configurations, with the line of each key, read as YAML 1.2: ``no`` is text and 1e-3 a number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from hftrain.core.errors import ConfigError

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
