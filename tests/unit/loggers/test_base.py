"""Names and numbers of metrics, and what environment variables say."""

from __future__ import annotations

from unittest.mock import Mock

import numpy
import pytest
import torch

from hftrain.core.errors import ConfigError
from hftrain.loggers.base import artifacts_asked, is_set, numbers_of, regroup
from hftrain.loggers.tensorboard import TensorBoardLogger


def test_regroup_names_the_stage() -> None:
    names = ["loss", "eval_loss", "eval_data1_loss", "test_f1", "train_runtime", "evaluation", "eval_"]
    assert list(regroup(dict.fromkeys(names, 1.0))) == [
        "train/loss",
        "eval/loss",
        "eval/data1_loss",
        "test/f1",
        "train/train_runtime",
        "train/evaluation",
        "train/eval_",
    ]


def test_numbers_are_plain_and_the_rest_is_warned_of_once() -> None:
    logs = {"a": 1, "b": torch.tensor(2.5), "c": numpy.float32(0.5), "d": True, "e": numpy.ones(1)}
    assert numbers_of(logs) == {"a": 1, "b": 2.5, "c": 0.5, "d": True, "e": 1.0}
    with pytest.warns(UserWarning, match="'f' is a list and is not reported"):
        assert numbers_of({"f": [1.0], "g": 1}) == {"g": 1}
    assert numbers_of({"f": [1.0]}) == {}  # a second warning would be an error


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("", False), ("0", False), ("TRUE", True), ("on", True)]
)
def test_is_set_reads_yes_and_no(monkeypatch: pytest.MonkeyPatch, value: str | None, expected: bool) -> None:
    monkeypatch.delenv("SOME_FLAG", raising=False)
    if value is not None:
        monkeypatch.setenv("SOME_FLAG", value)
    assert is_set("SOME_FLAG") is expected


def test_is_set_refuses_what_is_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_FLAG", "maybe")
    with pytest.raises(ConfigError, match="neither true nor false"):
        is_set("SOME_FLAG")


@pytest.mark.parametrize(("value", "expected"), [("false", "no"), ("true", "end"), ("all", "checkpoint")])
def test_artifacts_asked_reads_the_variable(monkeypatch: pytest.MonkeyPatch, value: str, expected: str) -> None:
    monkeypatch.setenv("SOME_MODEL", value)
    assert artifacts_asked("SOME_MODEL", {"true": "end", "all": "checkpoint"}) == expected


def test_artifacts_asked_refuses_another_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_MODEL", "everything")
    with pytest.raises(ConfigError, match="It has no such value"):
        artifacts_asked("SOME_MODEL", {"true": "end", "all": "checkpoint"})


def test_users_own_run_is_kept_for_a_second_training() -> None:
    own = Mock()
    logger = TensorBoardLogger(tb_writer=own)
    logger.close()
    assert not own.method_calls
    logger.log({"train/loss": 1.0}, 3)
    assert own.method_calls
