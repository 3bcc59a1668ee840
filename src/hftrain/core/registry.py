"""Registries that map names to classes, resolved on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, Generic, TypeVar

from hftrain.core.errors import ConfigError, MissingDependencyError, suggest
from hftrain.core.log import warn_once

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    target: str | Callable[..., Any]
    preset: dict[str, Any] = field(default_factory=dict)
    summary: str = ""
    # The entry point that defined it, as shown in messages.
    point: str = ""


class Registry(Generic[T]):
    """Create objects of one kind by name.

    A target is a class, a factory, or ``"package.module:Name"``, which is imported on first use. A preset holds
    default keyword arguments of a name. Other packages add names through the entry-point group.

    Args:
        kind: The kind of object, as shown in error messages (``"strategy"``).
        group: The entry-point group that other packages use.
        elsewhere: Other libraries' names and the corresponding names here, for the error about an unknown name.

    Example:
        >>> registry = Registry[dict]("box", group="hftrain.boxes")
        >>> registry.register("small", dict, size=1)
        >>> registry.create("small", colour="red")
        {'size': 1, 'colour': 'red'}
    """

    def __init__(
        self,
        kind: str,
        *,
        group: str,
        elsewhere: Mapping[str, str] | None = None,
    ) -> None:
        self.kind = kind
        self.group = group
        self._elsewhere = elsewhere or {}
        self._entries: dict[str, _Entry] = {}
        self._has_entry_points = False

    def register(self, name: str, target: str | Callable[..., T], /, *, summary: str = "", **preset: Any) -> None:
        """Add or replace a name; mutates the registry."""
        self._entries[name] = _Entry(target=target, preset=preset, summary=summary)

    def names(self, *, with_entry_points: bool = True) -> list[str]:
        """List all known names."""
        if with_entry_points:
            self._load_entry_points()
        return sorted(name for name, entry in self._entries.items() if with_entry_points or not entry.point)

    def usable_names(self) -> list[str]:
        """List the known names whose entry point can be imported; a warning lists the others."""
        names = []
        for name in self.names():
            try:
                self.resolve(name)
                names.append(name)
            except MissingDependencyError as error:
                warn_once(f"{error} It is skipped.")
        return names

    def summary(self, name: str) -> str:
        """Return the one-line description of a name."""
        return self._entry(name).summary

    def resolve(self, name: str) -> tuple[Callable[..., T], dict[str, Any]]:
        """Return the class (or factory) and the preset of a name."""
        entry = self._entry(name)
        target = entry.target
        if isinstance(target, str):
            module, _, attribute = target.partition(":")
            try:
                target = attrgetter(attribute)(importlib.import_module(module))
            except Exception as error:
                if not entry.point:
                    raise
                raise MissingDependencyError(
                    f"Cannot use {self.kind}={name!r}:",
                    f"its entry point {entry.point} cannot be imported ({type(error).__name__}: {error}).",
                    "Repair or uninstall that package, or choose another name.",
                ) from error
        return target, dict(entry.preset)

    def create(self, name: str, /, **kwargs: Any) -> T:
        """Create the object of a name; `kwargs` override the preset."""
        target, preset = self.resolve(name)
        return target(**{**preset, **kwargs})

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            self._load_entry_points()
        if name not in self._entries:
            raise ConfigError(
                f"Cannot use {self.kind}={name!r}.",
                f"No {self.kind} has that name.",
                f"Did you mean {term!r}?" if (term := self._elsewhere.get(str(name))) else suggest(name, self._entries),
            )
        return self._entries[name]

    def _load_entry_points(self) -> None:
        if self._has_entry_points:
            return
        self._has_entry_points = True
        for point in entry_points(group=self.group):
            dist = point.dist
            origin = f"'{point.name} = {point.value}'" + (f" of {dist.name} {dist.version}" if dist else "")
            if point.pattern.match(point.value) is None:
                warn_once(f"Entry point {origin} is skipped: it is not of the form 'package.module:Name'.")
            elif point.name in self._entries:
                warn_once(f"Entry point {origin} is skipped: the name is taken.")
            else:
                # Built from the parts: point.value may end in extras.
                target = f"{point.module}:{point.attr}"
                self._entries[point.name] = _Entry(target=target, summary=f"from {target}", point=origin)
