"""Optional packages."""

from __future__ import annotations

import sys

import pytest

from hftrain.core.errors import MissingDependencyError
from hftrain.core.extras import is_available, require


def test_package_is_looked_up_without_an_import() -> None:
    before = set(sys.modules)
    is_available("accelerate>=1.0")
    assert not {name for name in set(sys.modules) - before if name.partition(".")[0] == "accelerate"}


@pytest.mark.parametrize(
    ("requirement", "extra", "command"),
    [
        ("a_package_nobody_has>=2", None, r"Run: pip install 'a_package_nobody_has>=2'"),
        ("a_package_nobody_has", "nobody", r"Run: pip install 'hftrain\[nobody\]'"),
        ("torch>=999", None, r"Run: pip install 'torch>=999'"),
    ],
)
def test_absent_or_old_package_is_refused_with_the_command(requirement: str, extra: str | None, command: str) -> None:
    assert not is_available(requirement)
    with pytest.raises(MissingDependencyError, match=f"Cannot use strategy='x'.*{command}"):
        require(requirement, feature="strategy='x'", extra=extra)
