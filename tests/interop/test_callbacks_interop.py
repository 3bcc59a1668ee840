"""transformers' callbacks work here, and the names of its settings are known here."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from support.hub_models import make_model, make_rows, run_options  # noqa: E402
from support.resuming import without_times  # noqa: E402

import hftrain  # noqa: E402
from hftrain import ConfigError, Trainer, TrainerCallback, TrainingArguments  # noqa: E402
from hftrain.core.events import EVENTS  # noqa: E402

pytestmark = pytest.mark.interop


class Recorder(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.events: list[str] = []
        self.keywords: dict[str, set[str]] = {}


def _recording(event: str) -> Any:
    def handler(self: Recorder, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        assert isinstance(args, TrainingArguments)
        self.events.append(event)
        self.keywords[event] = {name for name, value in kwargs.items() if value is not None}
        return control

    return handler


for _event in EVENTS:
    setattr(Recorder, _event, _recording(_event))


def make_trainer(folder: Path, *callbacks: Any, **options: Any) -> Trainer:
    return Trainer(
        make_model("bert"),
        TrainingArguments(str(folder), **run_options(**options)),
        train_dataset=make_rows("bert"),
        eval_dataset=make_rows("bert", 4, seed=2),
        callbacks=list(callbacks),
    )


def test_transformers_early_stopping_stops_and_is_resumed(tmp_path):
    options = {"learning_rate": 0.0, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    options |= {"save_steps": 1, "metric_for_best_model": "loss", "load_best_model_at_end": True}
    trainer = make_trainer(tmp_path, transformers.EarlyStoppingCallback(early_stopping_patience=3), **options)
    # The first evaluation is the best; the next three are no better.
    assert trainer.train().global_step == 4
    saved = trainer.state.stateful_callbacks["EarlyStoppingCallback"]
    assert saved["attributes"]["early_stopping_patience_counter"] == 3
    resumed = make_trainer(tmp_path, transformers.EarlyStoppingCallback(early_stopping_patience=3), **options)
    assert resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2")).global_step == 4
    assert without_times(resumed.state.log_history) == without_times(trainer.state.log_history)


def test_transformers_printer_and_progress_bar_work(tmp_path, capsys):
    trainer = make_trainer(tmp_path, transformers.PrinterCallback, transformers.ProgressCallback, max_steps=1)
    trainer.train()
    trainer.evaluate()
    output = capsys.readouterr()
    assert "train_loss" in output.out
    assert "1/1" in output.err


# -- settings ----------------------------------------------------------------------------------------------------------


def settings_of(kind: Any) -> dict[str, Any]:
    return {field.name: field for field in dataclasses.fields(kind) if field.init}


def test_every_default_of_transformers_is_accepted():
    for name, field in settings_of(transformers.TrainingArguments).items():
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        TrainingArguments(**{"output_dir": "out", name: default})


@pytest.mark.parametrize(
    ("setting", "options"),
    [
        ({"max_grad_norm": 0.01}, {}),
        ({"max_grad_norm": 0.01}, {"max_grad_norm": 0.0}),
        ({"max_grad_norm": 0.0}, {"max_grad_norm": 0.01}),
        ({"save_total_limit": 1}, {}),
        ({"save_only_model": True}, {}),
        ({"per_device_eval_batch_size": 2, "prediction_loss_only": True}, {}),
    ],
)
def test_a_callback_changes_a_setting_in_the_run(tmp_path: Path, setting: dict[str, Any], options: Any) -> None:
    found, options = [], {"optim": "sgd", "eval_strategy": "epoch", "save_strategy": "epoch", **options}
    for library in (hftrain, transformers):

        class Changes(library.TrainerCallback):  # type: ignore[name-defined, misc]
            def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                if state.global_step:
                    vars(args).update(setting)

        folder = tmp_path / library.__name__
        arguments = library.TrainingArguments(str(folder), **run_options(**options))
        rows = {"train_dataset": make_rows("bert", 16), "eval_dataset": make_rows("bert", 4, seed=2)}
        trainer = library.Trainer(make_model("bert"), arguments, **rows, callbacks=[Changes])
        trainer.train()
        own = ("manifest.json", "journal.jsonl")
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.name not in own)
        norms = [parameter.norm().item() for parameter in trainer.model.parameters()]
        losses = [line.get("loss", line.get("eval_loss")) for line in trainer.state.log_history[:-1]]
        found.append((files, pytest.approx([*norms, *losses], rel=1e-5)))
    assert found[0][0] == found[1][0]
    assert found[0][1].expected == found[1][1]


@pytest.mark.parametrize("name", ["extra", "accuracy"])
def test_best_metric_that_comes_after_the_trainer_is_built(tmp_path: Path, name: str) -> None:
    """From a callback, which may add to the metrics that it is given, or from a `compute_metrics` that is set late."""

    class Adds(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            metrics["eval_extra"] = 1.0 / state.global_step

    best = {"load_best_model_at_end": True, "metric_for_best_model": name, "greater_is_better": True}
    trainer = make_trainer(tmp_path, eval_strategy="epoch", save_strategy="epoch", **best)
    with pytest.raises(ConfigError, match="Without compute_metrics"):
        trainer.train()
    if name == "extra":
        trainer.add_callback(Adds)
    else:
        trainer.compute_metrics = lambda prediction: {"accuracy": -1.0}
    trainer.train()
    assert trainer.state.best_metric == (1 / 6 if name == "extra" else -1.0)
