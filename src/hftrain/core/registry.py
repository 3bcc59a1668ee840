"""Names to classes, resolved on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, Generic, TypeVar

from hftrain.core.errors import ConfigError, explain, suggest

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    target: str | Callable[..., Any]
    preset: dict[str, Any] = field(default_factory=dict)
    summary: str = ""


class Registry(Generic[T]):
    """Create objects of one kind by name.

    A target is a class, a factory, or ``"package.module:Name"``, which is imported on first use. A preset holds
    keyword arguments that come with the name. Packages add their own names through the entry-point group.

    Args:
        kind: What the names stand for, as error messages should call it (``"strategy"``).
        group: The entry-point group that other packages use.

    Example:
        >>> registry = Registry[dict]("box", group="hftrain.boxes")
        >>> registry.register("small", dict, size=1)
        >>> registry.create("small", colour="red")
        {'size': 1, 'colour': 'red'}
    """

    def __init__(self, kind: str, *, group: str) -> None:
        self.kind = kind
        self.group = group
        self._entries: dict[str, _Entry] = {}
        self._has_entry_points = False

    def register(self, name: str, target: str | Callable[..., T], /, *, summary: str = "", **preset: Any) -> None:
        """Add or replace a name; mutates the registry."""
        self._entries[name] = _Entry(target=target, preset=preset, summary=summary)

    def names(self) -> list[str]:
        """List all known names, those of installed entry points included."""
        self._load_entry_points()
        return sorted(self._entries)

    def summary(self, name: str) -> str:
        """Return the one line that describes a name."""
        return self._entry(name).summary

    def resolve(self, name: str) -> tuple[Callable[..., T], dict[str, Any]]:
        """Return the class (or factory) and the preset behind a name.

        Raises:
            ConfigError: No such name; close matches are listed.
        """
        entry = self._entry(name)
        target = entry.target
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            target = attrgetter(attribute)(importlib.import_module(module))
        return target, dict(entry.preset)

    def create(self, name: str, /, **kwargs: Any) -> T:
        """Build the object behind a name; `kwargs` win over the preset.

        Raises:
            ConfigError: No such name; close matches are listed.
        """
        target, preset = self.resolve(name)
        return target(**{**preset, **kwargs})

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            self._load_entry_points()
        if name not in self._entries:
            raise ConfigError(
                explain(
                    f"{self.kind}={name!r} was asked for.",
                    f"No {self.kind} has that name.",
                    suggest(name, self._entries),
                    **{self.kind: name},
                )
            )
        return self._entries[name]

    def _load_entry_points(self) -> None:
        if self._has_entry_points:
            return
        self._has_entry_points = True
        for point in entry_points(group=self.group):
            # Not its value, which may end in extras.
            target = f"{point.module}:{point.attr}"
            self._entries.setdefault(point.name, _Entry(target=target, summary=f"from {target}"))
