"""The Intel extension.

No version of it fits torch's newest, and importing another one ends the process; so these tests bring a stand-in that
keeps to its documented `optimize`.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer
from hftrain.core.errors import MissingDependencyError

OURS = ".".join(torch.__version__.split(".")[:2])


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> list[dict[str, Any]]:
    """Install the stand-in in a version, and return the calls of its `optimize`."""
    calls: list[dict[str, Any]] = []

    def optimize(model: Any, optimizer: Any = None, **options: Any) -> Any:
        calls.append({"training": model.training, "optimizer": optimizer, **options})
        return model if optimizer is None else (model, optimizer)

    def find(name: str) -> str:
        if version is None:
            raise PackageNotFoundError(name)
        return version

    package = ModuleType("intel_extension_for_pytorch")
    package.optimize = optimize
    monkeypatch.setitem(sys.modules, "intel_extension_for_pytorch", package if version == f"{OURS}.0" else None)
    monkeypatch.setattr("hftrain.trainer.ipex.version", find)
    return calls


@pytest.mark.parametrize(("version", "said"), [(None, "it is not installed"), ("2.7.0", "version 2.7.0 is")])
def test_absent_or_other_version_is_refused_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, said: str
) -> None:
    install(monkeypatch, version)
    with pytest.raises(MissingDependencyError, match=rf"use_ipex=True.*needs.* {OURS}, and {said}.*torch_compile"):
        Trainer(Net(), make_arguments(tmp_path, use_ipex=True))


@pytest.mark.parametrize(("options", "dtype"), [({}, torch.float32), ({"bf16": True}, torch.bfloat16)])
def test_model_and_optimizer_are_optimized_for_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], dtype: torch.dtype
) -> None:
    calls = install(monkeypatch, f"{OURS}.0")
    trainer = Trainer(Net(), make_arguments(tmp_path, use_ipex=True, **options), train_dataset=make_rows())
    trainer.train()
    assert calls == [{"training": True, "optimizer": trainer.optimizer, "inplace": True, "dtype": dtype, "level": "O1"}]


def test_model_is_optimized_for_evaluation_without_folding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = install(monkeypatch, f"{OURS}.0")
    model = Net()
    trainer = Trainer(model, make_arguments(tmp_path, use_ipex=True), eval_dataset=make_rows())
    trainer.evaluate()
    assert [(call["training"], call["conv_bn_folding"]) for call in calls] == [(False, False)]
    assert trainer.ipex_optimize_model(model, dtype=torch.bfloat16) is model
    assert calls[-1]["dtype"] == torch.bfloat16
    assert Trainer(model, make_arguments(tmp_path)).ipex_optimize_model(model, training=True) is model
