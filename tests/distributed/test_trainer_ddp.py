"""The Trainer on two real processes equals the Trainer on one."""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.tiny import Net, Task, make_arguments, make_rows, make_trainer, train

from hftrain import (
    ConfigError,
    EarlyStoppingCallback,
    StrategyError,
    SummaryCallback,
    Trainer,
    TrainerCallback,
    set_seed,
)
from hftrain.strategies.watch import Agreement

pytestmark = pytest.mark.distributed


class InOrder(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def train_in_order(folder: str, *, rows: int, **options: Any) -> list[float]:
    set_seed(7)
    data = make_rows(rows)
    # As the last round is filled up on two processes.
    data += data[: -len(data) % 4] if options["per_device_train_batch_size"] == 4 else []
    trainer = InOrder(Net(), make_arguments(Path(folder), max_grad_norm=0.5, **options), train_dataset=data)
    trainer.train()
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]


def every_ragged_end(folder: str, size: int) -> list[list[float]]:
    return [
        train_in_order(folder, rows=rows, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation)
        for rows in (25, 26, 27, 28)
        for accumulation in (1, 3)
    ]


def test_ragged_end_trains_like_one_process_on_the_samples_it_is_filled_up_with(
    tmp_path: Path, run_distributed: Any
) -> None:
    both = run_distributed(every_ragged_end, folder=str(tmp_path), size=2)
    assert both[0] == both[1]
    for ours, theirs in zip(both[0], every_ragged_end(str(tmp_path), 4), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def override(folder: str, *, is_prepared: bool) -> list[int]:
    """Train with a loader of all samples that an override made."""
    seen: list[int] = []

    class Own(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = torch.utils.data.DataLoader(self.train_dataset, batch_size=2)
            return self.accelerator.prepare(loader) if is_prepared else loader

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            seen.extend(inputs.tolist())
            return model(torch.ones(2, 4) * inputs[:, None], torch.zeros(2, dtype=torch.int64))[0]

    trainer = Own(Net(), make_arguments(Path(folder), num_train_epochs=1), train_dataset=list(range(8)))
    with contextlib.nullcontext() if is_prepared else pytest.warns(UserWarning, match="reads all of the list"):
        trainer.train()
    return seen


@pytest.mark.parametrize("is_prepared", [True, False])
def test_loader_of_an_override_is_read_as_it_is(tmp_path: Path, run_distributed: Any, is_prepared: bool) -> None:
    both = run_distributed(override, folder=str(tmp_path), is_prepared=is_prepared)
    assert sorted(both[0] + both[1]) == sorted(list(range(8)) * (1 if is_prepared else 2))


def normalise(folder: str, **options: Any) -> list[float]:
    """Train a model with running statistics, and return the losses of its evaluations and its statistics."""

    class Normal(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers[1] = torch.nn.BatchNorm1d(8)

    set_seed(0)
    trainer = Trainer(
        Normal(), make_arguments(Path(folder), max_steps=3, **options),
        train_dataset=make_rows(24), eval_dataset=make_rows(5, seed=2),
    )  # fmt: skip
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    losses += [trainer.evaluate()["eval_loss"], trainer.predict(make_rows(5, seed=2)).metrics["test_loss"]]
    whole = make_rows(5, seed=2)
    model = trainer.model.eval()
    after = model(torch.stack([r["x"] for r in whole]), torch.stack([r["labels"] for r in whole]))[0].item()
    assert losses == pytest.approx([after] * len(losses), rel=1e-5)
    return [*losses, *trainer.model.layers[1].running_mean.tolist()]


@pytest.mark.parametrize("options", [{}, {"eval_strategy": "steps", "eval_steps": 3}], ids=["after", "during"])
def test_running_statistics_are_the_same_on_all_ranks_in_an_evaluation(
    tmp_path: Path, run_distributed: Any, options: dict[str, Any]
) -> None:
    both = run_distributed(normalise, folder=str(tmp_path), **options)
    assert both[0] == both[1]


class Scores(Trainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        own = [[1, 3, 2, 2, 4], [9, 1, 1, 1, 1]][int(torch.distributed.get_rank())][self.state.global_step - 1]
        if self.compute_metrics is not None:
            self.compute_metrics = lambda _: {"score": own}
            return super().evaluate(*args, **kwargs)
        return {**super().evaluate(*args, **kwargs), "eval_score": own}


def follow_scores(folder: str, is_override: bool) -> list[Any]:
    set_seed(0)
    arguments = make_arguments(
        Path(folder), max_steps=5, eval_strategy="steps", eval_steps=1, save_strategy="best",
        load_best_model_at_end=True, metric_for_best_model="score", greater_is_better=True,
    )  # fmt: skip
    callbacks = [] if is_override else [EarlyStoppingCallback(2)]
    trainer = Scores(
        Net(), arguments, train_dataset=make_rows(64), eval_dataset=make_rows(4), callbacks=callbacks,
        compute_metrics=None if is_override else dict,
    )  # fmt: skip
    trainer.train()
    if trainer.is_world_process_zero():
        trainer.save_model(f"{folder}/final")
    state = trainer.state
    return [state.global_step, state.best_metric, Path(str(state.best_model_checkpoint)).name]


@pytest.mark.parametrize(("is_override", "found"), [(True, [5, 4, "checkpoint-5"]), (False, [4, 3, "checkpoint-2"])])
def test_metrics_of_rank_0_decide_on_every_rank_and_it_saves_alone(
    tmp_path: Path, run_distributed: Any, is_override: bool, found: list[Any]
) -> None:
    assert run_distributed(follow_scores, folder=str(tmp_path), is_override=is_override) == [found] * 2
    assert (tmp_path / "final" / "model.safetensors").is_file()


def call_alone(folder: str, call: str, then: str) -> None:
    """Call a collective method on rank 0 only, while rank 1 makes another call, waits or ends."""
    options: dict[str, Any] = {"strategy": "fsdp"} if call == "save_model" else {}
    data = {"train_dataset": make_rows(32), "eval_dataset": make_rows(8)}
    trainer = make_trainer(Path(folder), None, max_steps=2, **data, **options)
    trainer.train()
    if trainer.is_world_process_zero():
        getattr(trainer, call)()
    elif then == "wait":
        torch.distributed.barrier()
    elif then != "end":
        getattr(trainer, then)()


@pytest.mark.parametrize(
    ("call", "then", "told"),
    [
        ("save_model", "evaluate", "rank 1 calls evaluate()"),
        ("save_model", "end", "rank 1 has ended"),
        ("evaluate", "wait", "rank 1 waits in 'between training and evaluations'"),
    ],
)
def test_collective_call_of_one_rank_is_an_error_at_once(
    tmp_path: Path, launch_distributed: Any, call: str, then: str, told: str
) -> None:
    start = time.monotonic()
    ended = launch_distributed(call_alone, kwargs={"folder": str(tmp_path), "call": call, "then": then}, forks=True)
    assert f"Rank 0 cannot call {call}() without the other ranks: {told}" in ended.output
    assert time.monotonic() - start < 60


def set_flag(folder: str, event: str, flag: str, ranks: list[int], accumulation: int = 1) -> list[int]:
    """Set a control flag at an event of step 2, on the given ranks; return the steps and the exchanges of flags."""

    def act(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index in ranks and state.global_step == 2:
            setattr(control, flag, True)

    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 9, "eval_strategy": "steps", "eval_steps": 2}
    data = {"train_dataset": make_rows(32), "eval_dataset": make_rows(3), "gradient_accumulation_steps": accumulation}
    trainer = make_trainer(Path(folder), None, type("Sets", (TrainerCallback,), {event: act})(), **data, **options)
    with mock.patch.object(Agreement, "check", autospec=True, side_effect=Agreement.check) as check:
        trainer.train()
    return [trainer.state.global_step, check.call_count]


@pytest.mark.parametrize(
    ("event", "flag", "rank", "accumulation"),
    [
        ("on_step_end", "should_training_stop", 0, 1),
        ("on_step_end", "should_save", 1, 2),
        ("on_evaluate", "should_epoch_stop", 1, 1),
        ("on_epoch_end", "should_training_stop", 1, 2),
    ],
)
def test_flag_that_one_rank_sets_is_an_error_that_names_it(
    tmp_path: Path, launch_distributed: Any, event: str, flag: str, rank: int, accumulation: int
) -> None:
    kwargs = {"folder": str(tmp_path), "event": event, "flag": flag, "ranks": [rank], "accumulation": accumulation}
    ended = launch_distributed(set_flag, kwargs=kwargs, forks=True)
    assert f"only some ranks set. Rank {rank}: {flag}=True; rank {1 - rank}: no change." in ended.output


@pytest.mark.parametrize(
    ("flag", "ranks", "found"),
    [("should_save", [], [4, 0]), ("should_save", [0, 1], [4, 1]), ("should_training_stop", [0, 1], [2, 1])],
)
def test_flag_that_all_ranks_set_acts_after_one_exchange(
    tmp_path: Path, run_distributed: Any, flag: str, ranks: list[int], found: list[int]
) -> None:
    choice = {"event": "on_step_end", "flag": flag, "ranks": ranks}
    assert run_distributed(set_flag, folder=str(tmp_path), **choice) == [found] * 2


class Bare(Trainer):
    def compute_loss(self, model: Any, *inputs: Any, **options: Any) -> Any:
        return super().compute_loss(self.model, *inputs, **options)


class Constant(Net):
    """Returns a loss that depends on nothing, in one process and its last step only."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        loss, logits = super().forward(x, labels)
        self.num_calls = getattr(self, "num_calls", 0) + 1
        is_constant = self.num_calls == 4 and torch.distributed.get_rank() == 1
        return (torch.zeros((), requires_grad=True) if is_constant else loss), logits


def fail(folder: str, kind: str, **options: Any) -> None:
    set_seed(0)
    args = make_arguments(Path(folder), max_steps=2, gradient_accumulation_steps=2)
    (Bare if kind == "bare" else Trainer)(
        Constant() if kind == "constant" else Net(), args, train_dataset=make_rows(32), **options
    ).train()


@pytest.mark.parametrize(
    ("kind", "strategy", "told"),
    [
        ("bare", "ddp", "without a call of the wrapped model"),
        *(("constant", name, "does not depend on what the model") for name in ("ddp", "ddp_find_unused", "fsdp")),
    ],
)
def test_gradients_that_are_not_exchanged_are_an_error(
    tmp_path: Path, launch_distributed: Any, kind: str, strategy: str, told: str
) -> None:
    kwargs = {"folder": str(tmp_path), "kind": kind, "strategy": strategy}
    ended = launch_distributed(fail, kwargs=kwargs, forks=True)
    assert "StrategyError: Cannot average the gradients of a step over the processes: " in ended.output
    assert told in ended.output


def step_without_a_loss(folder: str) -> int:
    """Skip the backward pass of every other step, on every process."""

    class Skips(Trainer):
        def training_step(self, model: Any, *inputs: Any) -> torch.Tensor:
            return super().training_step(model, *inputs) if self.state.global_step % 2 else torch.zeros(())

    trainer = Skips(Net(), make_arguments(Path(folder), max_steps=4), train_dataset=make_rows(32))
    trainer.train()
    return trainer.state.global_step


def test_steps_without_a_backward_pass_train_nothing(tmp_path: Path, run_distributed: Any) -> None:
    assert run_distributed(step_without_a_loss, folder=str(tmp_path)) == [4, 4]


def rehearse(folder: str) -> dict[str, Any]:
    """Rehearse on every process, and return what is left of it."""
    set_seed(7)
    options = {"max_steps": 6, "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(
        Path(folder) / "out", train_dataset=make_rows(24), eval_dataset=make_rows(7, seed=2), strategy="ddp",
        fast_dev_run=2, **options,
    )  # fmt: skip
    before = [p.detach().clone() for p in trainer.model.parameters()]
    output = trainer.train()
    return {
        "steps": output.global_step,
        "is_untouched": all(map(torch.equal, before, trainer.model.parameters())),
        "random": torch.rand(()).item(),
        "left": sorted(path.name for path in Path(folder).iterdir() if path.name == "out"),
    }


def test_two_processes_rehearse_together(tmp_path: Path, run_distributed: Any) -> None:
    both = run_distributed(rehearse, folder=str(tmp_path))
    set_seed(7)
    Net()
    assert both[0] == both[1]
    assert both[0] | {"random": 0} == {"steps": 2, "is_untouched": True, "random": 0, "left": []}


def print_progress(folder: str) -> str:
    """Train and evaluate with the default progress, and return what this process printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        parts = {"train_dataset": make_rows(24), "eval_dataset": make_rows(7, seed=2), "callbacks": [SummaryCallback]}
        args = make_arguments(Path(folder), disable_tqdm=False, num_train_epochs=1, eval_strategy="epoch")
        trainer = Trainer(Net(), args, strategy="ddp", **parts)
        trainer.train()
        trainer.predict(make_rows(7, seed=2))
    return printed.getvalue()


def test_only_rank_0_prints(tmp_path: Path, run_distributed: Any) -> None:
    first, second = run_distributed(print_progress, folder=str(tmp_path / "run"))
    assert second == ""
    lines = first.splitlines()
    assert [line.split("  ")[:2] for line in lines[:3]] == [
        [f"step {step}/3", f"epoch {step / 3:.2f}"] for step in (1, 2, 3)
    ]
    assert lines[3].startswith("step 3/3  epoch 1.00  eval_loss ")
    assert any(line.startswith("Trained 3 steps in ") for line in lines)
    assert lines[-1].startswith("predict: 100% 1/1 ")


class PartlyUsed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Linear(1, 1)


class SometimesUsed(PartlyUsed):
    used_in_steps = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.used_in_steps -= 1
        loss, logits = super().forward(x, labels)
        return (loss + 0 * self.unused.weight.sum() if self.used_in_steps >= 0 else loss), logits


def use_partly(where: str, *, used_in_steps: int, **options: Any) -> str:
    """Train a task that leaves a layer unused from some step on, and return its error."""
    task = Task()
    task.model = SometimesUsed()
    task.model.unused.bias.requires_grad_(False)
    task.model.used_in_steps = used_in_steps
    trainer = make_trainer(Path(where), task, max_steps=4, train_dataset=make_rows(32), **options)
    try:
        trainer.train()
    except StrategyError as error:
        return str(error)
    return f"trained {trainer.state.global_step}"


@pytest.mark.parametrize("used_in_steps", [0, 2])
def test_parameters_that_a_task_leaves_unused_are_named_with_the_setting(
    tmp_path: Path, launch_distributed: Any, used_in_steps: int
) -> None:
    kwargs = {"where": str(tmp_path), "used_in_steps": used_in_steps}
    ended = launch_distributed(use_partly, kwargs=kwargs, forks=True)
    for told in ended.results:
        assert "without a gradient (unused.weight)" in told
        assert "Set ddp_find_unused_parameters=True" in told


def test_search_for_unused_parameters_serves_a_task_that_leaves_some_unused(
    tmp_path: Path, run_distributed: Any
) -> None:
    told = run_distributed(use_partly, where=str(tmp_path), used_in_steps=1, ddp_find_unused_parameters=True)
    assert told == ["trained 4"] * 2


def test_a_task_prints_no_warning_of_torch_about_unused_parameters(tmp_path: Path, launch_distributed: Any) -> None:
    ended = launch_distributed(use_partly, kwargs={"where": str(tmp_path), "used_in_steps": 9}, forks=True)
    assert ended.results == ["trained 4"] * 2
    assert "find_unused_parameters" not in ended.output


def train_with_own_settings(settings: dict[str, list[Any]]) -> list[str]:
    """Train with each argument that has another value on each rank; answer with what is said."""
    rank, said = int(os.environ["RANK"]), []
    for name, values in settings.items():
        try:
            train(Path("run"), max_steps=2, **{name: values[rank]})
        except ConfigError as error:
            said.append(str(error).split(".\n")[0])
    return said


def test_settings_of_processes_that_differ_are_named(run_distributed: Any) -> None:
    settings = {"learning_rate": [0.25, 0.5], "gradient_accumulation_steps": [1, 2], "optim": ["sgd", "adamw_torch"]}
    first, second = run_distributed(train_with_own_settings, settings={**settings, "seed": [1, 2]})
    assert first == second
    assert "learning_rate=0.25 on rank 0 and 0.5 on rank 1" in first[0]
    assert len(first) == 3
