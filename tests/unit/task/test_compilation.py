"""torch.compile: what is compiled, how often, and what is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows, make_trainer

from hftrain import ConfigError, Trainer, TrainingArguments, set_seed
from hftrain.task.compilation import CompileConfig, Compiler

# What torch's own compiler warns about while it traces.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Counting:
    """A back-end that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self.num_runs = 0

    def __call__(self, graph: Any, inputs: Any, **options: Any) -> Any:
        self.num_graphs += 1

        def run(*args: Any) -> Any:
            self.num_runs += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def counting() -> Iterator[Counting]:
    """Register a back-end by name, as another package would."""
    from torch._dynamo.backends import registry

    backend = Counting()
    registry.register_backend(backend, name="counting")
    torch._dynamo.reset()
    yield backend
    torch._dynamo.reset()
    registry._BACKENDS.pop("counting", None)
    registry._COMPILER_FNS.pop("counting", None)


def train(folder: Path, model: Any, **options: Any) -> Trainer:
    """Train three epochs of 22 samples, of which the last batch is short, and return the Trainer."""
    given = {"torch_compile_backend": "counting", "num_train_epochs": 3, **options}
    trainer = make_trainer(folder, model, eval_dataset=make_rows(9, seed=2), **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", [Net, Task])
def test_steps_epochs_and_the_short_batch_compile_once(tmp_path: Path, counting: Counting, kind: Any) -> None:
    trainer = train(tmp_path, kind())
    assert trainer.state.global_step == 18
    assert counting.num_graphs == 1
    assert counting.num_runs == 15  # the three short batches ran as written


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_true"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_accumulation_and_precision_compile_once(
    tmp_path: Path, counting: Counting, precision: str, accumulation: int
) -> None:
    make_trainer(
        tmp_path, train_dataset=make_rows(24), precision=precision, torch_compile_backend="counting",
        gradient_accumulation_steps=accumulation, num_train_epochs=3,
    ).train()  # fmt: skip
    # torch traces a hook that changes the inputs, as bf16_true's, into a graph of its own.
    assert counting.num_graphs == (2 if precision == "bf16_true" else 1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_run_equals_the_plain_one(tmp_path: Path, backend: str) -> None:
    histories = []
    for options in ({}, {"torch_compile_backend": backend}):
        set_seed(0)
        trainer = make_trainer(tmp_path, **options)
        trainer.train()
        histories.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert histories[0] == pytest.approx(histories[1], rel=1e-6)


def test_model_stays_itself_and_names_stay(tmp_path: Path, counting: Counting) -> None:
    model = Net()
    names = list(model.state_dict())
    trainer = train(tmp_path, model, save_strategy="epoch")
    assert trainer.model is model
    assert list(trainer.model.state_dict()) == names
    assert trainer.strategy.model_state(trainer.model_wrapped).keys() == set(names)
    from safetensors.torch import load_file

    assert set(load_file(tmp_path / "checkpoint-18" / "model.safetensors")) == set(names)
    assert model._compiled_call_impl is None  # afterwards it runs as written


def test_model_runs_as_written_after_an_error(tmp_path: Path, counting: Counting) -> None:
    class Failing(Net):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            raise RuntimeError("broken")

    model = Failing()
    with pytest.raises(RuntimeError, match="broken"):
        train(tmp_path, model)
    assert model._compiled_call_impl is None
    assert "ACCELERATE_DYNAMO_BACKEND" not in os.environ


def test_batches_of_many_sizes_share_a_second_graph(counting: Counting) -> None:
    compiler, model = Compiler(CompileConfig(backend="counting")), Net()
    compiler.compile(model)
    compiler.compile(model)
    for size in (8, 7, 6, 5, 4, 3, 7, 6, 5, 9):
        model(torch.randn(size, 4))
    assert counting.num_graphs == 2
    compiler.close()


def test_environment_tells_accelerate_while_a_verb_runs(
    tmp_path: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Watching(Net):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            torch._dynamo.graph_break()
            seen.append((os.environ.get("ACCELERATE_DYNAMO_BACKEND"), os.environ.get("ACCELERATE_DYNAMO_MODE")))
            return super().forward(x, labels)

    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    with pytest.warns(UserWarning, match="torch_compile_mode='reduce-overhead' is an option of inductor"):
        train(tmp_path, Watching(), torch_compile_mode="reduce-overhead", max_steps=1)
    assert seen[0] == ("counting", "reduce-overhead")
    assert os.environ["ACCELERATE_DYNAMO_BACKEND"] == "no"
    assert "ACCELERATE_DYNAMO_MODE" not in os.environ


@pytest.mark.parametrize(
    ("options", "launched", "expected"),
    [
        ({}, {}, None),
        ({}, {"BACKEND": "NO", "MODE": "default"}, None),
        ({}, {"BACKEND": "EAGER"}, None),  # as by transformers.TrainingArguments: nothing has launched the process
        (
            {},
            {"BACKEND": "AOT_EAGER", "MODE": "default", "USE_FULLGRAPH": "False"},
            CompileConfig(backend="aot_eager", mode="default"),
        ),
        ({"torch_compile": True}, {}, CompileConfig(backend="inductor")),
        ({"torch_compile": True}, {"BACKEND": "eager"}, CompileConfig(backend="inductor")),
        ({"torch_compile_backend": "eager"}, {}, CompileConfig(backend="eager")),
        ({"torch_compile_mode": "reduce-overhead"}, {}, CompileConfig(mode="reduce-overhead")),
    ],
)
def test_arguments_and_launcher_choose(
    options: dict[str, Any], launched: dict[str, str], expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BACKEND", "MODE"):
        monkeypatch.delenv(f"ACCELERATE_DYNAMO_{name}", raising=False)
    for name, value in launched.items():
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", value)
    assert CompileConfig.of(TrainingArguments("out", **options)) == expected


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"torch_compile_backend": "nvfuser"}, "Invalid backend: 'nvfuser'.*inductor"),  # which torch had once
        ({"torch_compile_mode": "fast"}, "torch_compile_mode='fast'.*max-autotune"),
    ],
)
def test_backend_or_mode_that_torch_does_not_know_is_refused(tmp_path: Path, options: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Trainer(Net(), make_arguments(tmp_path, **options))


@pytest.mark.slow
def test_inductor_trains(tmp_path: Path) -> None:
    trainer = train(tmp_path, Net(), torch_compile_backend="inductor", num_train_epochs=1)
    assert trainer.state.global_step == 6
