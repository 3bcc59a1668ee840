"""What of XLA shows without torch_xla; tests/distributed/test_xla.py trains with it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from support.tiny import Net, make_trainer

from hftrain.core import seed
from hftrain.core.errors import ConfigError, MissingDependencyError, StrategyError
from hftrain.core.extras import is_available
from hftrain.precision.registry import precisions
from hftrain.step.legality import check_legal
from hftrain.strategies import xla
from hftrain.strategies.registry import create_strategy


@pytest.fixture
def pretend_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the strategy be made where torch_xla, which needs a torch of its own, is absent; nothing is launched."""
    monkeypatch.setattr(xla, "require", lambda *args, **kwargs: None)


@pytest.mark.skipif(is_available("torch_xla"), reason="torch_xla is installed")
@pytest.mark.parametrize("name", ["xla", "xla_fsdp", "xla_fsdp_v2"])
def test_strategy_without_torch_xla_is_refused(name: str) -> None:
    with pytest.raises(MissingDependencyError, match=r"Cannot use strategy='xla'.*pip install 'hftrain\[xla\]'"):
        create_strategy(name)


@pytest.mark.usefixtures("pretend_installed")
def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process drives all devices"):
        create_strategy("xla")


@pytest.mark.usefixtures("pretend_installed")
@pytest.mark.parametrize(("precision", "reason"), [("fp16", "'bf16' works"), ("tf32", "TF32 exists on CUDA")])
def test_precision_that_cannot_be_is_refused(precision: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_legal(create_strategy("xla"), precisions.create(precision))


@pytest.mark.usefixtures("pretend_installed")
def test_other_devices_are_refused() -> None:
    reason = xla.XLAStrategy.refuses(precisions.create("fp32").policy, "cuda")
    assert reason == "it runs on XLA devices only"


@pytest.mark.usefixtures("pretend_installed")
@pytest.mark.parametrize(("cores", "batch_size"), [(None, 4), (8, 32)])
def test_number_of_cores_multiplies_the_batch_once(tmp_path, cores: int | None, batch_size: int) -> None:
    trainer = make_trainer(tmp_path, strategy="xla", use_cpu=False, tpu_num_cores=cores)
    assert trainer.args.train_batch_size == batch_size
    assert trainer.get_total_train_batch_size(trainer.args) == batch_size


@pytest.mark.usefixtures("pretend_installed")
def test_recomputing_needs_layers() -> None:
    with pytest.raises(ConfigError, match="no layers were named"):
        xla.XLAStrategy(shards=True, recomputes=True).check_model(Net())
    xla.XLAStrategy(shards=True, recomputes=True, layer_classes=["Sequential"]).check_model(Net())


@pytest.mark.usefixtures("pretend_installed")
def test_several_replicas_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch_xla says that there are two: on a CPU, real ones do not survive their start."""
    names = ("torch_xla", "torch_xla.core", "torch_xla.core.xla_model", "torch_xla.runtime")
    made = {name: ModuleType(name) for name in names}
    made["torch_xla"].core, made["torch_xla"].runtime = made["torch_xla.core"], made["torch_xla.runtime"]
    made["torch_xla.core"].xla_model = made["torch_xla.core.xla_model"]
    made["torch_xla.runtime"].world_size = lambda: 2
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(StrategyError, match=r"There are 2 replicas .*tpu_num_cores=N.*replicas=2"):
        create_strategy("xla").launch()


@pytest.mark.usefixtures("pretend_installed")
def test_making_it_touches_no_device() -> None:
    strategy = create_strategy("xla_fsdp", num_devices=4)
    assert (strategy.name, strategy.device_type, strategy.world_size, strategy.shards) == ("xla", "xla", 1, True)
    assert torch.device("xla") == strategy.planned_device


def test_added_generator_is_seeded_captured_and_restored() -> None:
    held = [5]
    forget = seed.add_generator("mine", capture=lambda: held[0], restore=lambda value: held.__setitem__(0, value))
    try:
        state = seed.capture_rng()
        seed.set_seed(11)
        assert held == [11]
        seed.restore_rng(state)
        assert held == [5]
    finally:
        forget()
    assert "mine" not in seed.capture_rng()
    seed.restore_rng(state)
