from __future__ import annotations

import copy
import pickle

import pytest

from hftrain.arguments import (
    DebugOption,
    EvaluationStrategy,
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


@pytest.mark.parametrize("choice", CHOICES)
def test_member_survives_copy_and_pickle(choice):
    for member in choice:
        assert copy.deepcopy(member) is member
        assert pickle.loads(pickle.dumps(member)) is member


def test_yaml_no_means_no():
    assert IntervalStrategy(False) is IntervalStrategy.NO


def test_counts_are_the_documented_ones():
    assert len(OptimizerNames) == 43
    assert len(SchedulerType) == 12  # of transformers 5
    assert EvaluationStrategy is IntervalStrategy
