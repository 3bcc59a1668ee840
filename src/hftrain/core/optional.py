"""Optional packages: checked by requirement, with the install command in the error."""

from __future__ import annotations

import re
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hftrain.core.errors import MissingDependencyError


def is_available(requirement: str) -> bool:
    """Return whether an installed package satisfies `requirement` (``"deepspeed>=0.16"``), without importing it."""
    return bool(_cache(requirement))


def require(requirement: str, *, feature: str, extra: str | None = None) -> None:
    """Raise unless an optional package is installed in a version that the requirement allows.

    Args:
        feature: The setting that needs it, as the user wrote it (``"strategy='deepspeed'"``).
    """
    if not _cache(requirement):
        package = re.split(r"[^\w.-]", requirement)[0]
        release = _version(package)
        target = f"hftrain[{extra}]" if extra else requirement
        state = "which is not installed" if release is None else f"and {package} {release} is installed"
        raise MissingDependencyError(
            f"Cannot use {feature}:", f"it needs {requirement}, {state}.", f"Run: pip install '{target}'"
        )


def installed_versions(*packages: str) -> dict[str, str]:
    """Return the versions of the given packages, without those that are not installed."""
    return {package: found for package in packages if (found := _version(package)) is not None}


@cache  # read at each save, and parsing the package's metadata is slow
def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cache(requirement: str) -> Any:
    # Imported here because the requirement parser is slow to import.
    from lightning_utilities.core.imports import RequirementCache

    return RequirementCache(requirement)
