"""Liger kernels.

liger-kernel needs Triton and a GPU to compute, so these tests bring a stand-in for its table of patching functions; its
names and signatures are the package's.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.tiny import Net, make_arguments
from torch import nn

from hftrain import ConfigError, Trainer
from hftrain.core.errors import MissingDependencyError
from hftrain.core.extras import is_available


class Llama(nn.Module):
    """A transformers-like model."""

    def __init__(self, model_type: str = "llama") -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type=model_type)
        self.linear = nn.Linear(2, 2)

    def save_pretrained(self, folder: str) -> None:
        """Do as transformers models can."""

    def forward(self, x: Any, labels: Any = None) -> Any:
        return self.linear(x)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, bool]]]:
    """Install the stand-in and return what it is asked to patch."""
    seen: list[tuple[Any, dict[str, bool]]] = []

    def apply_liger_kernel_to_llama(rope: bool = True, swiglu: bool = True, model: Any = None) -> None:
        seen.append((model, {"rope": rope, "swiglu": swiglu}))

    package, table = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers.monkey_patch")
    table.MODEL_TYPE_TO_APPLY_LIGER_FN = {"llama": apply_liger_kernel_to_llama}
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", ModuleType("liger_kernel.transformers"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", table)
    monkeypatch.setattr("hftrain.extras.liger.require", lambda *args, **kwargs: None)
    return seen


@pytest.mark.parametrize(
    ("config", "expected"),
    [(None, {"rope": True, "swiglu": True}), ({"swiglu": False}, {"rope": True, "swiglu": False})],
)
def test_model_is_patched_at_construction(tmp_path: Path, calls: Any, config: Any, expected: dict[str, bool]) -> None:
    model = Llama()
    Trainer(model, make_arguments(tmp_path, use_liger_kernel=True, liger_kernel_config=config))
    assert calls == [(model, expected)]


def test_other_models_warn(tmp_path: Path, calls: Any) -> None:
    with pytest.warns(UserWarning, match="use_liger_kernel=True does nothing to a Net"):
        Trainer(Net(), make_arguments(tmp_path, use_liger_kernel=True))
    assert calls == []


def test_kind_without_kernels_is_refused(tmp_path: Path, calls: Any) -> None:
    with pytest.raises(ConfigError, match=r"no kernels for model_type='bert'.*Liger knows: llama"):
        Trainer(Llama("bert"), make_arguments(tmp_path, use_liger_kernel=True))


@pytest.mark.skipif(is_available("liger-kernel") and is_available("triton"), reason="Liger is installed")
def test_absent_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDependencyError, match=r"Cannot use use_liger_kernel=True.*(liger-kernel|triton)"):
        Trainer(Llama(), make_arguments(tmp_path, use_liger_kernel=True))
