from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, MissingDependencyError, TaskError, Trainer
from hftrain.arguments.enums import DebugOption
from hftrain.extras.engine_settings import xla
from hftrain.extras.engine_settings.xla import XLAMetricsCallback

FORMS = ["underflow_overflow", ["underflow_overflow"], [DebugOption.UNDERFLOW_OVERFLOW], DebugOption.UNDERFLOW_OVERFLOW]


def has_hooks(model: torch.nn.Module) -> bool:
    return any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("debug", FORMS)
def test_overflow_stops_the_run_and_leaves_no_hooks(
    tmp_path: Path, debug: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = make_rows(8)
    rows[5]["x"] = torch.full((4,), float("inf"))
    net = Net()
    trainer = Trainer(net, make_arguments(tmp_path, debug=debug, num_train_epochs=1), train_dataset=rows)
    with pytest.raises(TaskError, match=r"layers\.0 \(Linear\).* held an infinity or NaN"):
        trainer.train()
    assert "layers.0 Linear" in caplog.text
    assert not has_hooks(net)


@pytest.mark.parametrize(("debug", "is_hooked"), [("", False), ("underflow_overflow", True)])
def test_hooks_exist_only_while_a_run_that_asks_lasts(tmp_path: Path, debug: str, is_hooked: bool) -> None:
    seen = []

    class Look(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
            seen.append(has_hooks(self.model))
            return super().training_step(model, inputs, num_items_in_batch)

    net = Net()
    trainer = Look(net, make_arguments(tmp_path, debug=debug, max_steps=2), train_dataset=make_rows())
    trainer.train()
    assert seen == [is_hooked] * 2
    assert not has_hooks(net)


def pretend_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for torch_xla, which needs another torch than the one under test."""
    metrics = ModuleType("torch_xla.debug.metrics")
    metrics.metrics_report = lambda: "Metric: CompileTime"  # type: ignore[attr-defined]
    package, debug = ModuleType("torch_xla"), ModuleType("torch_xla.debug")
    package.debug, debug.metrics = debug, metrics  # type: ignore[attr-defined]
    for module in (package, debug, metrics):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(xla, "require", lambda *args, **kwargs: None)


@pytest.mark.parametrize(
    "debug", ["tpu_metrics_debug", "underflow_overflow tpu_metrics_debug", ["underflow_overflow", "tpu_metrics_debug"]]
)
def test_xla_metrics_without_torch_xla_are_refused(tmp_path: Path, debug: Any) -> None:
    with pytest.raises(MissingDependencyError, match=r"Cannot use debug='tpu_metrics_debug'.*torch_xla"):
        Trainer(Net(), make_arguments(tmp_path, debug=debug))


def test_older_form_of_xla_metrics_asks_for_the_same(tmp_path: Path) -> None:
    with pytest.warns(FutureWarning, match="debug='tpu_metrics_debug'"):
        args = make_arguments(tmp_path, tpu_metrics_debug=True)
    with pytest.raises(MissingDependencyError, match="torch_xla"):
        Trainer(Net(), args)


def test_xla_metrics_on_another_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_xla(monkeypatch)
    with pytest.raises(ConfigError, match="strategy 'single' does not run on XLA"):
        Trainer(Net(), make_arguments(tmp_path, debug="tpu_metrics_debug"))


def test_xla_metrics_are_printed_after_epochs_and_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_xla(monkeypatch)
    args = make_arguments(tmp_path, eval_strategy="epoch", num_train_epochs=2)
    callbacks = [XLAMetricsCallback()]
    Trainer(Net(), args, train_dataset=make_rows(), eval_dataset=make_rows(), callbacks=callbacks).train()
    assert capsys.readouterr().out.count("Metric: CompileTime") == 4


# What torch.compile itself says of a graph that goes on from an intermediate result.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_overflow_is_watched_in_a_compiled_model_without_compiling_each_batch_anew(tmp_path: Path) -> None:
    import torch._dynamo

    options: dict[str, Any] = {"debug": "underflow_overflow", "torch_compile": True, "torch_compile_backend": "eager"}
    trainer = Trainer(Net(), make_arguments(tmp_path, **options), train_dataset=make_rows())
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        assert trainer.train().global_step == 12
