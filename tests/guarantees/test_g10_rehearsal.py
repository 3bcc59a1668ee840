"""G10: the error of hour ten comes in minute one.

Each case would fail late, or train for nothing. It is refused before the model is called, before a process group is
made and before anything is written, and the message says what to do.
"""

from __future__ import annotations

import functools
import multiprocessing
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_server import running_hub
from support.tiny import MapRows, Net, Stream, Task, make_arguments, make_rows

from hftrain import EarlyStoppingCallback, EvalSet, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerCallback
from hftrain.callbacks.base import ExportableState
from hftrain.core.errors import HFTrainError
from hftrain.data.collators import default_data_collator
from hftrain.data.loaders import check_sendable

STEPS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
BEST: dict[str, Any] = {**STEPS, "load_best_model_at_end": True}


class Watched(Net):
    calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        Watched.calls += 1
        return super().forward(x, labels)


class Picky(Watched):
    def forward(  # type: ignore[override]
        self, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        return super().forward(x, labels)


class Unsaveable(Watched):
    """Has state that safetensors cannot hold."""

    def get_extra_state(self) -> Any:
        return {"not": "a tensor"}

    def set_extra_state(self, state: Any) -> None:
        pass


class Frozen(Watched):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Stateful(TrainerCallback, ExportableState):
    """Exports what no JSON file can hold."""

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"lock": threading.Lock()}}


class Closure(torch.optim.SGD):
    """Like LBFGS: a step that calls the model again."""

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


def one(prediction: Any) -> dict[str, float]:
    return {"one": 1.0}


def unlabelled() -> list[dict[str, torch.Tensor]]:
    return [{"x": row["x"]} for row in make_rows(9)]


def other_optimizer() -> tuple[Any, Any]:
    model = Net()
    return torch.optim.SGD(model.parameters(), lr=0.1), None


def make(folder: Path, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
    """Return a Trainer of one process that would form a group to train."""
    arguments = {name: options.pop(name) for name in list(options) if hasattr(make_arguments(folder), name)}
    defaults: dict[str, Any] = {
        "model": Watched(),
        "train_dataset": make_rows(),
        "eval_dataset": make_rows(9, seed=2),
        "strategy": "ddp",
    }
    return kind(args=make_arguments(folder, **arguments), **{**defaults, **options})


# What is asked for, and what the error says.
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown metric without compute_metrics": (
        {**BEST, "metric_for_best_model": "f1"},
        r"metric_for_best_model='f1'.*Pass compute_metrics",
    ),
    "metric of one of several sets": (
        {**BEST, "metric_for_best_model": "loss", "eval_dataset": {"a": make_rows(4), "b": make_rows(4)}},
        "set metric_for_best_model to .*eval_a_loss",
    ),
    "plateau schedule without its metric": (
        {**STEPS, "lr_scheduler_type": "reduce_lr_on_plateau", "eval_dataset": {"a": make_rows(4)}},
        "to .eval_a_loss.",
    ),
    "best model between evaluations": ({**BEST, "save_steps": 3}, "Make save_steps a multiple of eval_steps"),
    "best model without evaluation": ({**BEST, "eval_strategy": "no"}, "Set eval_strategy"),
    "early stopping without a metric": (
        {**STEPS, "callbacks": [EarlyStoppingCallback()]},
        "metric_for_best_model",
    ),
    "evaluation without data": ({**STEPS, "eval_dataset": None}, "Pass eval_dataset"),
    "empty evaluation set": ({**STEPS, "eval_dataset": []}, "at least one sample"),
    "evaluation set without labels": (
        {**STEPS, "eval_dataset": unlabelled(), "compute_metrics": one},
        r"Cannot use compute_metrics.*labels.*label_names",
    ),
    "one of the sets without labels": (
        {**STEPS, "eval_dataset": {"a": make_rows(4), "b": unlabelled()}, "compute_metrics": one},
        r"Cannot use compute_metrics.*'b'.*labels",
    ),
    "evaluation set too short": (
        {**STEPS, "eval_dataset": make_rows(3), "dataloader_drop_last": True},
        "evaluation set.*dataloader_drop_last=False",
    ),
    "training set too short": (
        {"train_dataset": make_rows(3), "dataloader_drop_last": True},
        "dataset is too small.*dataloader_drop_last=False",
    ),
    "empty training set": ({"train_dataset": []}, "train_dataset is empty"),
    "stream without max_steps": ({"train_dataset": Stream(make_rows())}, "max_steps"),
    "no column for the model": ({"train_dataset": [{"y": torch.zeros(4)}]}, "Rename the columns"),
    "a column missing": ({"model": Picky()}, "mask"),
    "compute_metrics that cannot be called": ({**STEPS, "compute_metrics": {"f1": 1}}, "compute_metrics.*function"),
    "metrics of a set that cannot be called": (
        {**STEPS, "eval_dataset": {"a": EvalSet(make_rows(4), metrics="f1")}},
        "function",
    ),
    "preprocess_logits that cannot be called": (
        {**STEPS, "compute_metrics": one, "preprocess_logits_for_metrics": 3},
        "preprocess_logits_for_metrics.*function",
    ),
    "metrics by batch that do not know the last": (
        {**STEPS, "compute_metrics": one, "batch_eval_metrics": True},
        "compute_result",
    ),
    "inputs for metrics that are not there": (
        {**STEPS, "compute_metrics": one, "include_for_metrics": ["inputs"]},
        "main_input_name",
    ),
    "folder that cannot be written": ({**STEPS, "output_dir": "/proc/nowhere"}, "/proc/nowhere.*Give a folder"),
    "model that cannot be saved": ({**STEPS, "model": Unsaveable()}, "save_safetensors=False"),
    "callback that cannot be saved": ({**STEPS, "callbacks": [Stateful()]}, "Stateful"),
    "model without anything to train": ({"model": Frozen()}, "requires_grad_"),
    "illegal precision": ({"precision": "tf32"}, "precision='tf32'.*CUDA"),
    "unknown precision": ({"precision": "fp17"}, "precision"),
    "unknown strategy": ({"strategy": "dpp"}, "Did you mean"),
    "strategy that is not installed": ({"strategy": "xla"}, "xla"),
    "tracker that is not installed": ({"report_to": "comet_ml"}, "comet"),
    "optimizer that is not installed": ({"optim": "lomo"}, "lomo"),
    "optimizer that accumulates in backward": ({"optim": "adalomo", "gradient_accumulation_steps": 2}, "lomo"),
    "optimizer that calls the model again": (
        {"optimizer_cls_and_kwargs": (Closure, {"lr": 0.1})},
        "closure",
    ),
    "optimizer of another model": ({"optimizers": other_optimizer()}, "none of the model's parameters"),
    "schedule of another optimizer": ({"optimizers": "mixed"}, "another optimizer"),
    "schedule with an unknown option": ({"lr_scheduler_kwargs": {"num_cicles": 2}}, "num_cicles"),
    "schedule longer than the run": (
        {
            "lr_scheduler_type": "warmup_stable_decay",
            "lr_scheduler_kwargs": {"num_decay_steps": 100},
        },
        "Lower num_decay_steps",
    ),
    "resume from nothing": ({"resume": True}, "no valid checkpoint"),
    "resume from a folder that is none": ({"resume": "nowhere"}, "nowhere"),
    "unknown compile backend": ({"torch_compile_backend": "inductr"}, "inductr"),
}


@pytest.fixture(autouse=True)
def nothing_yet() -> None:
    Watched.calls = 0


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_before_the_first_step(tmp_path: Path, case: str) -> None:
    options, text = dict(CASES[case][0]), CASES[case][1]
    resume = options.pop("resume", None)
    if options.get("optimizers") == "mixed":
        options["model"] = model = Watched()
        schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(Net().parameters(), lr=0.1))
        options["optimizers"] = torch.optim.SGD(model.parameters(), lr=0.1), schedule
    with pytest.raises((HFTrainError, ImportError), match=f"(?s){text}") as caught:
        make(Path(options.pop("output_dir", tmp_path / "out")), **options).train(resume_from_checkpoint=resume)
    assert "Traceback" not in str(caught.value)
    assert_nothing_happened(tmp_path / "out")


def assert_nothing_happened(folder: Path) -> None:
    assert Watched.calls == 0
    assert not torch.distributed.is_initialized()
    assert not folder.exists() or not list(folder.iterdir())


# -- what needs more than a setting ----------------------------------------------------------------------------------


class Opened(MapRows):
    """A dataset that holds what no other process can be given."""

    def __init__(self) -> None:
        super().__init__(make_rows())
        self.file = threading.Lock()


@pytest.fixture
def spawning() -> Iterator[None]:
    """Start worker processes as macOS, Windows and newer Pythons do."""
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("spawn", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("spawning")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"train_dataset": Opened()}, r"train_dataset \(Opened\) cannot be sent to a worker.*num_workers=0"),
        ({**STEPS, "eval_dataset": {"a": Opened()}}, r"eval_dataset 'a' \(Opened\) cannot be sent"),
        ({"data_collator": lambda rows: default_data_collator(rows)}, r"data_collator \(function\) cannot be sent"),
    ],
)
def test_what_workers_cannot_be_given_is_refused(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(HFTrainError, match=text):
        make(tmp_path / "out", dataloader_num_workers=1, **options).train()
    assert_nothing_happened(tmp_path / "out")


@pytest.mark.usefixtures("spawning")
def test_what_workers_can_be_given_is_not_read(tmp_path: Path) -> None:
    rows = [{"x": torch.zeros(4), "labels": torch.tensor(0)}] * 8
    check_sendable({"data": rows, "collate": functools.partial(default_data_collator)}, num_workers=1)
    assert not rows[0]["x"].is_shared()


def test_forked_workers_inherit_everything() -> None:
    if multiprocessing.get_start_method() != "fork":
        pytest.skip("workers are not forked here")
    check_sendable({"data": threading.Lock()}, num_workers=1)


def test_metric_that_compute_metrics_does_not_report_is_found_by_a_rehearsal(tmp_path: Path) -> None:
    options = {**BEST, "compute_metrics": one, "strategy": None, "metric_for_best_model": "f1"}
    with pytest.raises(HFTrainError, match="eval_one"):
        make(tmp_path / "out", fast_dev_run=1, **options).train()
    assert not (tmp_path / "out").exists()


def test_compute_metrics_is_called_once_per_evaluation_with_the_whole_set(tmp_path: Path) -> None:
    sizes: list[int] = []

    def count(prediction: Any) -> dict[str, float]:
        sizes.append(len(prediction.label_ids))
        return {"f1": float(len(sizes))}

    trainer = make(tmp_path / "out", compute_metrics=count, strategy=None, metric_for_best_model="f1", **BEST)
    trainer.train()
    assert sizes == [9] * sum("eval_f1" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize(
    ("options", "text"), [({"hub_token": "hf_nobody"}, "hub_token"), ({"hub_model_id": "bob/x"}, "bob/x")]
)
def test_what_the_hub_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], text: str
) -> None:
    with running_hub(monkeypatch), pytest.raises(HFTrainError, match=text):
        make(tmp_path / "out", push_to_hub=True, **options)
    assert_nothing_happened(tmp_path / "out")


def test_generation_with_a_model_that_cannot_is_refused(tmp_path: Path) -> None:
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path / "out"), predict_with_generate=True, report_to="none", use_cpu=True, **STEPS
    )
    with pytest.raises(HFTrainError, match="has no method generate"):
        Seq2SeqTrainer(Watched(), arguments, train_dataset=make_rows(), eval_dataset=make_rows(9), compute_metrics=one)
    assert_nothing_happened(tmp_path / "out")


@pytest.mark.parametrize("options", [{}, {"model": Task()}, {"train_dataset": Stream(make_rows()), "max_steps": 4}])
def test_what_works_is_let_through(tmp_path: Path, options: dict[str, Any]) -> None:
    given = {"compute_metrics": one, "strategy": None, "max_steps": 4, **STEPS, **options}
    assert make(tmp_path, **given).train().global_step == 4
