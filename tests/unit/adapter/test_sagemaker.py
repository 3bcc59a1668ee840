from __future__ import annotations

from pathlib import Path

import pytest
from support.tiny import Task, make_arguments

from hftrain import ConfigError, Trainer


@pytest.mark.parametrize("value", ["", "{}", " {} "])
def test_empty_model_parallel_parameters_pass(tmp_path: Path, value: str) -> None:
    assert Trainer(Task(), make_arguments(tmp_path, mp_parameters=value)).strategy.name == "single"


def test_model_parallel_parameters_are_refused_with_the_successor(tmp_path: Path) -> None:
    args = make_arguments(tmp_path, mp_parameters='{"partitions": 2}', fp16=True)
    with pytest.raises(ConfigError, match=r"mp_parameters=.*model-parallel.*torch_distributed.*fsdp='full_shard'"):
        Trainer(Task(), args)


@pytest.mark.parametrize(
    ("variable", "value", "mode", "reason"),
    [
        ("SM_HP_MP_PARAMETERS", '{"partitions": 2}', "sagemaker_model_parallel", "model-parallel runtime"),
        (
            "SM_FRAMEWORK_PARAMS",
            '{"sagemaker_distributed_dataparallel_enabled": true}',
            "sagemaker_data_parallel",
            "data-parallel runtime.*strategy='ddp'",
        ),
    ],
)
def test_launchers_runtime_is_recognised_and_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, mode: str, reason: str
) -> None:
    monkeypatch.setenv(variable, value)
    args = make_arguments(tmp_path)
    assert args.parallel_mode == mode
    with pytest.raises(ConfigError, match=reason):
        Trainer(Task(), args)


def test_several_machines_without_a_launcher_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SM_HOSTS", '["algo-1"]')
    Trainer(Task(), make_arguments(tmp_path))
    monkeypatch.setenv("SM_HOSTS", '["algo-1", "algo-2"]')
    with pytest.raises(ConfigError, match=r"SM_HOSTS lists 2 machines.*torch_distributed.*strategy='ddp'"):
        Trainer(Task(), make_arguments(tmp_path))


@pytest.mark.parametrize("value", ["", "{}", "no json", "[]", '{"sagemaker_distributed_dataparallel_enabled": false}'])
def test_other_settings_of_the_launcher_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("SM_FRAMEWORK_PARAMS", value)
    assert make_arguments(tmp_path).parallel_mode == "not_parallel"
    Trainer(Task(), make_arguments(tmp_path))
