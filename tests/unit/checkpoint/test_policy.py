"""What a save policy accepts."""

from __future__ import annotations

from typing import Any

import pytest

from hftrain import ConfigError, SavePolicy


@pytest.mark.parametrize(
    "wrong",
    [
        {"every_s": 0},
        {"every_s": -1.0},
        {"every_s": "30m"},
        {"every_s": True},
        {"keep_best": 0},
        {"keep_best": True},
        {"keep_best": 1.5},
        {"on_full_disk": "ignore"},
    ],
)
def test_policy_refuses_what_has_no_meaning(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SavePolicy(**wrong)


def test_policy_by_default_changes_nothing_but_signals() -> None:
    policy = SavePolicy()
    asked = policy.save_async, policy.on_exception, policy.every_s, policy.keep_best
    assert (policy.on_signal, *asked) == (True, False, False, None, None)
