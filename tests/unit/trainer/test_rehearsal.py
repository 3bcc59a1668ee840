"""`fast_dev_run`: every stage is passed, and nothing of it stays."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support import tiny
from support.tiny import Net, Noisy, Stream, Task, make_rows

from hftrain import (
    ConfigError,
    EarlyStoppingCallback,
    EvalPrediction,
    EvalSet,
    Logger,
    TaskError,
    Trainer,
    TrainerCallback,
    set_seed,
)
from hftrain.core.seed import capture_rng

BASIC: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch", "gradient_accumulation_steps": 2}


class Diary(TrainerCallback):
    """Write down what happens, and count."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.steps: list[int] = []
        self.count = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1
        self.steps.append(state.global_step)
        happened.append(f"step {state.global_step}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        happened.append("evaluate " + ",".join(sorted(name for name in metrics if name.endswith("_loss"))))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert (Path(args.output_dir) / f"checkpoint-{state.global_step}").is_dir()
        happened.append("save")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        happened.append("end")


happened: list[str] = []


@pytest.fixture(autouse=True)
def nothing_happened_yet() -> None:
    happened.clear()


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def make_trainer(folder: Path, model: Any = None, **options: Any) -> Trainer:
    """Return one that takes part in much."""
    defaults: dict[str, Any] = {
        "train_dataset": Noisy(make_rows()),
        "eval_dataset": {"one": make_rows(9, seed=2), "two": EvalSet(make_rows(9, seed=3), every=2)},
        "compute_metrics": accuracy,
        "callbacks": [Diary()],
    }
    model = Net(dropout=0.2) if model is None and "model_init" not in options else model
    return tiny.make_trainer(folder, model, **{**BASIC, **defaults, **options})


def test_every_stage_is_passed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(
        tmp_path / "out", fast_dev_run=2, metric_for_best_model="one_accuracy", load_best_model_at_end=True
    )
    output = trainer.train()
    evaluated = ["evaluate eval_one_loss", "evaluate eval_two_loss"]
    assert happened == ["step 1", "step 2", *evaluated, "save", "end", "step 3", "end"]
    assert output.global_step == 2
    assert output.training_loss > 0
    said = capsys.readouterr().out
    assert "Dry run with fast_dev_run=2 took " in said
    assert "train     2 steps of 8 samples" in said
    assert "evaluate  2 batches for eval_two_*" in said
    assert "save      checkpoint-2" in said
    assert "resume    from it, then 1 more step" in said
    assert "A run of 6 steps takes about" in said


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_true"])
def test_nothing_stays(tmp_path: Path, precision: str) -> None:
    diary, stopping = Diary(), EarlyStoppingCallback(early_stopping_patience=3)
    trainer = make_trainer(
        tmp_path / "deep" / "out",
        fast_dev_run=2,
        precision=precision,
        callbacks=[diary, stopping],
        metric_for_best_model="one_accuracy",
        load_best_model_at_end=True,
    )
    model = trainer.model
    before = copy.deepcopy(dict(model.state_dict().items()))
    settings, generators, state = dict(vars(trainer.args)), capture_rng(), trainer.state.to_json()
    python = random.getstate()
    trainer.train()
    assert not any(tmp_path.iterdir())
    assert trainer.model is model
    assert trainer.model_wrapped is trainer.callback_handler.model is model
    assert trainer.optimizer is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.dtype for p in model.parameters()] == [torch.float32] * len(list(model.parameters()))
    assert dict(vars(trainer.args)) == settings
    assert trainer.state.to_json() == state
    assert not any(vars(trainer.control).values())
    assert (diary.steps, diary.count, stopping.early_stopping_patience_counter) == ([], 0, 0)
    assert trainer.callback_handler.callbacks[-3:-1] == [diary, stopping]
    after = capture_rng()
    assert torch.equal(after["cpu"], generators["cpu"])
    assert after["numpy"] == generators["numpy"]
    assert random.getstate() == python


def train(folder: Path, *, rehearses: bool, **options: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """Train, with a rehearsal of the very same model, optimizer and data before it or without one."""
    set_seed(5)
    model, data = Net(dropout=0.2), Noisy(make_rows())
    if options.pop("brings_optimizer", False):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        options["optimizers"] = (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2))
    if rehearses:
        rehearsing = make_trainer(folder, model, train_dataset=data, fast_dev_run=3, **options)
        rehearsing.train()
        rehearsing.strategy.close()
    trainer = make_trainer(folder, model, train_dataset=data, **options)
    trainer.train()
    weights = [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in trainer.model.parameters()]
    trainer.strategy.close()
    logs = [{n: v for n, v in entry.items() if "second" not in n and "runtime" not in n} for entry in
            trainer.state.log_history]  # fmt: skip
    return logs, weights


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"brings_optimizer": True},
        {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
        {"torch_compile": False, "auto_find_batch_size": True},
        {"strategy": "ddp"},
        {"strategy": "fsdp"},
    ],
)
def test_run_after_a_rehearsal_equals_one_without(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = train(tmp_path / "plain", rehearses=False, **options)
    rehearsed = train(tmp_path / "rehearsed", rehearses=True, **options)
    assert rehearsed[0] == plain[0]
    assert all(torch.equal(one, other) for one, other in zip(rehearsed[1], plain[1], strict=True))


def test_same_trainer_trains_after_its_rehearsal(tmp_path: Path) -> None:
    model = Net()
    trainer = make_trainer(tmp_path, copy.deepcopy(model), fast_dev_run=2)
    trainer.train()
    trainer.fast_dev_run = 0
    set_seed(1)
    trainer.train()
    plain = make_trainer(tmp_path / "plain", model)
    set_seed(1)
    plain.train()
    for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert trainer.state.global_step == plain.state.global_step == 6


def test_resume_is_rehearsed_from_the_users_checkpoint(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=3).train()
    happened.clear()
    trainer = make_trainer(tmp_path, fast_dev_run=1, save_strategy="steps", save_steps=3)
    assert trainer.train(resume_from_checkpoint=True).global_step == 4
    assert [event for event in happened if event.startswith("step")] == ["step 4", "step 5"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"checkpoint-3", "journal.jsonl"}


def test_task_stream_and_model_init_are_rehearsed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"train_dataset": Stream(make_rows()), "max_steps": 5, "eval_dataset": make_rows(5), "fast_dev_run": True}
    trainer = make_trainer(tmp_path / "out", Task(), compute_metrics=None, save_strategy="no", **options)
    trainer.train()
    assert "save      not rehearsed: save_strategy='no'" in capsys.readouterr().out
    fresh = make_trainer(tmp_path / "out", model_init=Net, save_only_model=True, **options)
    fresh.train()
    assert "resume    not rehearsed: save_only_model=True" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_end_of_the_plan_is_the_end_of_the_rehearsal(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, fast_dev_run=50, max_steps=3).train().global_step == 3


class Telling(Logger):
    name = "telling"
    told: ClassVar[list[str]] = []

    def start(self, facts: Any) -> None:
        self.told.append("start")

    def log(self, metrics: Any, step: int) -> None:
        self.told.append("log")


def test_trackers_and_hub_hear_nothing(tmp_path: Path) -> None:
    # Nothing answers at that address, and nobody asks.
    trainer = make_trainer(tmp_path / "out", fast_dev_run=1, loggers=[Telling()], push_to_hub=True, hub_model_id="a/b")
    trainer.train()
    trainer.evaluate()
    assert Telling.told == []
    assert trainer.args.push_to_hub
    assert not (tmp_path / "out").exists()


def test_evaluate_and_predict_take_so_many_batches(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, fast_dev_run=2, per_device_eval_batch_size=2, eval_dataset=make_rows(9))
    assert len(trainer.predict(make_rows(9)).predictions) == 4
    steps = []
    trainer.add_callback(type("Steps", (TrainerCallback,), {"on_prediction_step": lambda *a, **k: steps.append(1)}))
    trainer.evaluate()
    assert len(steps) == 2


class Failing(TrainerCallback):
    """Fails where a run comes late."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise ValueError("too late")


def test_error_of_a_late_stage_comes_now_and_nothing_stays(tmp_path: Path) -> None:
    model = Net()
    before = copy.deepcopy(list(model.parameters()))
    trainer = make_trainer(tmp_path / "out", model, fast_dev_run=1, callbacks=[Failing()])
    with pytest.raises(ValueError, match="too late"):
        trainer.train()
    assert not (tmp_path / "out").exists()
    assert trainer.model is model
    assert all(map(torch.equal, model.parameters(), before))


def test_model_that_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    model = Net()
    model.source = (row for row in ())
    with pytest.raises(TaskError, match=r"It trains a copy, and Net or its optimizer cannot be copied\b.*model_init="):
        make_trainer(tmp_path, model, fast_dev_run=1).train()


@pytest.mark.parametrize("given", [-1, 2.0, "2"])
def test_other_values_are_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(ConfigError, match="how many batches of every stage to rehearse"):
        make_trainer(tmp_path, fast_dev_run=given)


def test_search_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model_init=Net, fast_dev_run=1)
    with pytest.raises(ConfigError, match="With fast_dev_run nothing is trained"):
        trainer.hyperparameter_search()
    trainer.train(trial={"learning_rate": 0.1})
    assert "step 1" in happened
