from __future__ import annotations

import pytest

from hftrain.arguments.enums import (
    DebugOption,
    FSDPOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
    ShardedDDPOption,
)

CHOICES = [
    IntervalStrategy,
    SaveStrategy,
    HubStrategy,
    SchedulerType,
    OptimizerNames,
    DebugOption,
    FSDPOption,
    ShardedDDPOption,
]


@pytest.mark.parametrize("choice", CHOICES)
def test_member_equals_hashes_and_prints_as_its_value(choice):
    for member in choice:
        assert member == member.value
        assert {member.value: 1}[member] == 1
        assert str(member) == f"{member}" == member.value
        assert repr(member) == repr(member.value)
        assert choice(member.value) is choice(member) is member


def test_yaml_no_means_no():
    assert IntervalStrategy(False) is IntervalStrategy.NO
