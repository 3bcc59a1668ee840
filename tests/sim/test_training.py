"""Whatever trains gives the CPU's numbers on an accelerator, to the bit where nothing else is said."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support import engines, gan
from support.tiny import Net, Task, at, make_rows, make_trainer, share
from support.two_devices import numbers, run, run_on_both, weights
from torch import nn

from hftrain import (
    EMA,
    SWA,
    EarlyStoppingCallback,
    FlightLog,
    Freeze,
    GradientClipping,
    Mixture,
    SavePolicy,
    SpikeGuard,
    Throughput,
    set_seed,
)
from hftrain.cli.blame import show_blame
from hftrain.cli.replay import show_replay
from hftrain.core.devices import move, to_host
from hftrain.extras.flight.fingerprint import Fingerprint
from hftrain.extras.flight.reading import read_ledger
from hftrain.preemption.signals import TrainingStopped
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.sim


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.last(self.second(self.first(x).tanh()))
        return nn.functional.cross_entropy(logits, labels), logits


SAME: dict[str, dict[str, Any]] = {
    "plain": {},
    "task": {"model": Task},
    "tied": {"model": Tied},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.05},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9"},
    "adamw": {"optim": "adamw_torch"},
    "fused": {"optim": "adamw_torch_fused"},
    "adafactor": {"optim": "adafactor"},
    "muon": {"optim": "muon"},
    "schedule": {"lr_scheduler_type": "cosine", "warmup_steps": 3},
    "workers": {"dataloader_num_workers": 2},
    "evaluation": {"eval_strategy": "epoch", "eval_dataset": make_rows(10, seed=2)},
    "metrics": {"eval_strategy": "steps", "eval_steps": 3, "eval_dataset": make_rows(10, 2), "compute_metrics": share},
    "checkpoints": {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 2},
    "best": {
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
        "eval_dataset": make_rows(10, seed=2),
    },
    "last batch": {"dataloader_drop_last": True},
    "nan filter": {"logging_nan_inf_filter": False, "logging_steps": 3},
    "label smoothing": {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("case", SAME)
def test_numbers_are_the_cpus(tmp_path: Path, case: str) -> None:
    run_on_both(tmp_path, **SAME[case])


def test_bf16_is_close_to_the_cpus(tmp_path: Path) -> None:
    """A GPU's autocast computes LayerNorm in float32, the CPU's in bfloat16."""
    settings: dict[str, Any] = {"bf16": True, "bf16_full_eval": True, "eval_strategy": "epoch", "tolerance": 5e-3}
    run_on_both(tmp_path, eval_dataset=make_rows(10, seed=2), **settings)


CALLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "EMA": (lambda: EMA(0.9), {"save_strategy": "steps", "save_steps": 4}),
    "SWA": (lambda: SWA(start=0.5), {}),
    "SpikeGuard skips": (lambda: SpikeGuard("skip", rolling_interval_length=4), {}),
    "SpikeGuard rewinds": (
        lambda: SpikeGuard("rewind", rolling_interval_length=4),
        {"save_strategy": "steps", "save_steps": 4},
    ),
    "Throughput": (Throughput, {}),
    "GradientClipping": (lambda: GradientClipping("value", 0.01), {"max_grad_norm": 0}),
    "Freeze": (lambda: Freeze("layers.0"), {}),
    "EarlyStopping": (
        lambda: EarlyStoppingCallback(1),
        {
            "eval_strategy": "steps", "eval_steps": 2, "eval_dataset": make_rows(8, 2), "save_strategy": "steps",
            "save_steps": 2, "load_best_model_at_end": True,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLED)
def test_callbacks_change_what_they_change_on_the_cpu(tmp_path: Path, case: str) -> None:
    callback, options = CALLED[case]
    run_on_both(tmp_path, Net, callback, **options)


def test_a_background_save_holds_the_weights_of_its_step(tmp_path: Path) -> None:
    """While copies to the host are late: the file must not be written from memory that they have not reached."""
    settings: dict[str, Any] = {"use_cpu": False, "save_strategy": "steps", "save_steps": 3}
    run(tmp_path / "now", **settings)
    run(tmp_path / "later", save_policy=SavePolicy(save_async=True), **settings)
    for step in (3, 6, 9, 12):
        one, other = (
            load_file(tmp_path / name / f"checkpoint-{step}" / "model.safetensors") for name in ("now", "later")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_fp16_skips_the_steps_that_overflow_on_the_cpu(tmp_path: Path) -> None:
    """Without LayerNorm, which a GPU's autocast computes in float32."""

    class Loud(Net):
        steps = 0

        def __init__(self) -> None:
            super().__init__()
            del self.layers[1]

        def forward(self, x: torch.Tensor, labels: Any = None) -> tuple[torch.Tensor, ...]:
            logits = self.layers(x).float()
            self.steps += self.training
            return nn.functional.cross_entropy(logits, labels) * (1e38 if self.steps == 3 else 1), logits

    trainer = run_on_both(tmp_path, Loud, fp16=True)
    assert all(torch.isfinite(value).all() for value in weights(trainer))
    assert len({entry["loss"] for entry in trainer.state.log_history if "loss" in entry}) > 6


def test_compiled_steps_are_the_cpus(tmp_path: Path) -> None:
    run_on_both(tmp_path, torch_compile=True, torch_compile_backend="aot_eager", tolerance=1e-6, max_steps=3)


class Large(Net):
    """Needs 256 KiB of memory a sample."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        kept = x.new_empty(len(x), 1 << 16)
        return super().forward(x + 0 * len(kept), labels)


@pytest.mark.parametrize(("way", "steps"), [(True, 2), ("smaller_batch", 1)])
def test_a_batch_that_does_not_fit_is_halved(tmp_path: Path, sim: Any, way: Any, steps: int) -> None:
    """The step stays the same, or is one of half the size: what the CPU does with batches of 2 from the start."""
    rows: dict[str, Any] = {"train_dataset": make_rows(24)}
    with sim.memory_limit(sim.memory_allocated() + 3 * (1 << 18)):
        found = run(tmp_path / "sim", Large, use_cpu=False, auto_find_batch_size=way, **rows)
    assert found.state.train_batch_size == 2
    settings: dict[str, Any] = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": steps}
    expected = run(tmp_path / "cpu", Large, use_cpu=True, **settings, **rows)
    assert all(map(torch.equal, weights(expected), weights(found)))
    assert numbers(found) == numbers(expected)


def test_tuning_finds_what_it_finds_on_the_cpu(tmp_path: Path, sim: Any) -> None:
    tuned: list[Any] = []
    for use_cpu in (True, False):
        set_seed(0)
        trainer = make_trainer(tmp_path / str(use_cpu), Large(), use_cpu=use_cpu, train_dataset=make_rows(64))
        rates = trainer.tune.lr(num_steps=12, max_lr=10.0)
        with sim.memory_limit(sim.memory_allocated() + 9 * (1 << 18)):
            size = trainer.tune.batch_size()
        assert size == (64 if use_cpu else 8)
        trainer.train()
        tuned.append([rates, numbers(trainer), [each.tolist() for each in weights(trainer)]])
    assert tuned[0] == tuned[1]


def test_a_search_finds_what_it_finds_on_the_cpu(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    found: list[Any] = []
    for use_cpu in (True, False):
        trainer = make_trainer(
            tmp_path / str(use_cpu), model_init=Net, eval_dataset=make_rows(8, 2), use_cpu=use_cpu, max_steps=4,
            eval_strategy="steps", eval_steps=2,
        )  # fmt: skip
        sampler = optuna.samplers.GridSampler({"learning_rate": [1e-3, 1e-1]}, seed=0)
        found.append(
            trainer.hyperparameter_search(
                lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-3, 1e-1)},
                n_trials=2, backend="optuna", sampler=sampler,
            )
        )  # fmt: skip
        assert trainer.strategy.device.type == ("cpu" if use_cpu else "sim")
    assert found[0] == found[1]


def test_predictions_are_the_cpus(tmp_path: Path) -> None:
    on_cpu, on_sim = (run(tmp_path / str(use_cpu), use_cpu=use_cpu) for use_cpu in (True, False))
    expected, found = (trainer.predict(make_rows(10, seed=3)) for trainer in (on_cpu, on_sim))
    assert (expected.predictions == found.predictions).all()
    assert expected.metrics["test_loss"] == found.metrics["test_loss"]


@pytest.mark.parametrize(("every", "most"), [(None, 9), (3, 2)])
def test_predictions_leave_the_device_every_so_many_batches(
    tmp_path: Path, sim: Any, every: int | None, most: int
) -> None:
    held: list[int] = []
    look = at("on_prediction_step", lambda *_, **__: held.append(sim.memory_allocated() // 120_000))
    settings = {"eval_accumulation_steps": every, "per_device_eval_batch_size": 1, "use_cpu": False}
    parts = {"preprocess_logits_for_metrics": lambda logits, labels: logits.repeat(1, 10_000)}
    trainer = make_trainer(tmp_path, Net(), look, **settings, **parts)
    assert trainer.predict(make_rows(9)).predictions.shape == (9, 30_000)
    assert max(held) == most


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = run(tmp_path, Tied, use_cpu=False).model
    assert model.first.weight is model.second.weight


def test_a_run_with_dropout_resumes_to_the_bit(tmp_path: Path) -> None:
    def dropping() -> Net:
        return Net(dropout=0.3)

    settings: dict[str, Any] = {"use_cpu": False, "save_strategy": "steps", "save_steps": 4}
    whole = run(tmp_path / "a", dropping, **settings)
    resumed = run(tmp_path / "b", dropping, resume=str(tmp_path / "a/checkpoint-4"), **settings)
    for one, other in zip(weights(whole), weights(resumed), strict=True):
        assert torch.equal(one, other)
    assert numbers(resumed)[-3:] == numbers(whole)[-3:]


@pytest.mark.parametrize("onto_cpu", [True, False])
def test_a_checkpoint_goes_on_on_the_other_device(tmp_path: Path, *, onto_cpu: bool) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    whole = run(tmp_path / "a", use_cpu=not onto_cpu, **settings)
    resumed = run(tmp_path / "b", use_cpu=onto_cpu, resume=str(tmp_path / "a/checkpoint-4"), **settings)
    assert all(map(torch.equal, weights(whole), weights(resumed)))


def test_the_current_device_is_the_one_that_trains(tmp_path: Path, sim: Any) -> None:
    before = sim.num_allocations(0)
    sim.set_device(1)
    try:
        trainer = run(tmp_path, use_cpu=False)
    finally:
        sim.set_device(0)
    assert next(trainer.model.parameters()).device == torch.device("sim:1")
    assert sim.num_allocations(0) == before


def test_a_mixture_is_read_as_on_the_cpu(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    for use_cpu in (True, False):
        mixture = Mixture({"a": (make_rows(12), 1.0), "b": (make_rows(12, seed=2), 2.0)})
        run(tmp_path / str(use_cpu), use_cpu=use_cpu, train_dataset=mixture, **settings)
    one, other = (load_file(tmp_path / name / "checkpoint-6/model.safetensors") for name in ("True", "False"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_signal_saves_and_the_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    def stop(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = run(tmp_path / "a", use_cpu=False)
    with pytest.raises(TrainingStopped, match="SIGTERM"):
        run(tmp_path / "b", Net, lambda: at("on_step_end", stop), use_cpu=False, save_strategy="steps", save_steps=50)
    assert (tmp_path / "b/checkpoint-5").is_dir()
    resumed = run(tmp_path / "b", use_cpu=False, resume=True, save_strategy="steps", save_steps=50)
    assert all(map(torch.equal, weights(whole), weights(resumed)))


def test_an_engine_trains_as_on_the_cpu(tmp_path: Path) -> None:
    found, expected = (
        engines.train(tmp_path / name, strategy=create_strategy("single", use_cpu=name == "cpu"))
        for name in ("sim", "cpu")
    )
    assert found == expected


@pytest.mark.parametrize("options", [{}, {"fp16": True}], ids=str)
def test_several_optimizers_take_the_cpus_steps(tmp_path: Path, options: dict[str, Any]) -> None:
    found, expected = (
        gan.make(tmp_path / str(use_cpu), gan.Gan(takes_turns=True), use_cpu=use_cpu, **options)
        for use_cpu in (False, True)
    )
    found.train()
    expected.train()
    assert gan.weights(found) == gan.weights(expected)
    assert numbers(found) == numbers(expected)


FLIGHT = """
import sys
from pathlib import Path
from support.tiny import Net, at, make_rows
from support.two_devices import run, seed_once
from torch.nn.functional import cross_entropy
from hftrain import FlightLog

rows = make_rows(160)
for bad in (17, 90):
    rows[bad]["x"] *= 1000

def sample_losses(outputs, batch):
    return cross_entropy(outputs[1], batch["labels"], reduction="none")

class Plain(Net):
    def __init__(self):
        super().__init__(dropout=0.1)
        del self.layers[1:3]

run(Path(sys.argv[1]), Plain, seed_once, use_cpu=bool(sys.argv[2]), train_dataset=rows, max_steps=36,
    save_strategy="steps", save_steps=10, flight_log=FlightLog(sample_losses=sample_losses))
"""


def test_a_flight_log_is_the_cpus_and_steps_are_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(FLIGHT)
    found = []
    for name, on_cpu in (("cpu", "cpu"), ("sim", "")):
        monkeypatch.setattr(sys, "argv", words := [str(script), str(tmp_path / name), on_cpu])
        runpy.run_path(str(script), run_name="__main__")
        blamed = show_blame(str(tmp_path / name), output=str(tmp_path / f"{name}.json"))
        lines = [line | {"ms": None} for (line,) in read_ledger(tmp_path / name).values()]
        found.append([lines, blamed.data["suspects"]])
    again = show_replay(str(tmp_path / "sim"), step=25, output=str(tmp_path / "again"), script=words)
    assert again.data["parted"] is None
    assert {17, 90} <= {each["sample"] for each in found[1][1]}
    assert found[0] == found[1]


def test_a_fingerprint_of_nothing_is_on_the_device_too() -> None:
    """A process that has no element of a part adds its numbers to those of others."""
    copy = nn.Parameter(torch.ones(3, device="sim"))
    copy.is_copy = True  # type: ignore[attr-defined]
    assert Fingerprint([copy]).of(0).device.type == "sim"


def test_sample_losses_get_a_batch_on_the_device(tmp_path: Path) -> None:
    def sample_losses(outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs[1], batch["labels"], reduction="none")

    run(tmp_path, use_cpu=False, flight_log=FlightLog(sample_losses=sample_losses))


def test_arguments_tell_the_device(tmp_path: Path) -> None:
    assert run(tmp_path, use_cpu=False).args.device.type == "sim"


def test_tied_weights_stay_tied_where_torch_unties_them(tmp_path: Path, sim: Any) -> None:
    with sim.strict_assignment():
        model = run(tmp_path, Tied, use_cpu=False).model
    assert model.first.weight is model.second.weight


def test_a_default_device_of_the_program_changes_no_copy(sim: Any) -> None:
    there, model = torch.ones(3, device="sim"), nn.Linear(2, 2)
    weight = model.weight
    torch.set_default_device("sim")
    try:
        with sim.strict_assignment():
            assert move(model, torch.device("sim", 0)).weight is weight
        copy = to_host(there)()
    finally:
        torch.set_default_device(None)
    assert (copy.device.type, copy.tolist(), weight.device.type) == ("cpu", [1.0] * 3, "sim")
