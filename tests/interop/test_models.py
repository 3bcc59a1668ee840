"""transformers models, `datasets` tables and tokenizers go through the whole life of a run as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from support.hub_models import (  # noqa: E402
    NAMES,
    Rows,
    make_model,
    make_rows,
    make_tokenizer,
    run_options,
    same_weights,
)
from support.resuming import StopAt, without_times  # noqa: E402

from hftrain import StepOutput, TaskModule, Trainer, TrainingArguments  # noqa: E402

pytestmark = pytest.mark.interop

FORMS = ("table", "stream", "list")


def as_form(rows: Rows, form: str) -> Any:
    """Give samples, with two columns that no model takes, in one of the forms that data comes in."""
    rows = [{"text": "a b", **row, "source": index} for index, row in enumerate(rows)]
    if form == "list":
        return rows
    table = datasets.Dataset.from_list(rows)
    return table if form == "table" else table.to_iterable_dataset(num_shards=2)


def make_trainer(folder: Path, name: str, form: str = "table", *, dropout: float = 0.0, **options: Any) -> Trainer:
    parts = {key: options.pop(key) for key in ("callbacks", "compute_metrics", "processing_class") if key in options}
    return Trainer(
        make_model(name, dropout=dropout),
        TrainingArguments(str(folder), **run_options(**options)),
        train_dataset=as_form(make_rows(name), form),
        eval_dataset=as_form(make_rows(name, 7, seed=2), form),
        **parts,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_resuming_in_the_middle_equals_a_run_that_never_stopped(tmp_path, name, form):
    # 22 samples, 4 a batch, 2 batches a step: step 4 is in the second of three passes.
    options = {"form": form, "dropout": 0.1, "max_steps": 8, "gradient_accumulation_steps": 2, "warmup_steps": 2}
    options |= {"logging_steps": 3, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps"}
    whole = make_trainer(tmp_path / "whole", name, **options)
    whole.train()
    make_trainer(tmp_path / "parts", name, callbacks=[StopAt(4)], **options).train()
    resumed = make_trainer(tmp_path / "parts", name, **options)
    output = resumed.train(resume_from_checkpoint=True)
    assert output.global_step == 8
    assert same_weights(resumed.model, whole.model)
    assert without_times(resumed.state.log_history) == without_times(whole.state.log_history)


# -- caches ------------------------------------------------------------------------------------------------------------


class WholeOutput(TaskModule):
    """Returns all that the model returned as the predictions."""

    def training_step(self, batch):
        return self.model(**batch).loss

    def evaluation_step(self, batch):
        output = self.model(**batch)
        return StepOutput(loss=output.loss, outputs=dict(output), labels=batch["labels"])


@pytest.mark.parametrize("ignore", [None, [], ["past_key_values"], ["cache"]], ids=str)
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_cache_of_a_model_is_no_prediction(tmp_path, name, declared, ignore):
    seen = []
    options = {"use_cache": True, "compute_metrics": lambda given: seen.append(given.predictions) or {"m": 1.0}}
    trainer = make_trainer(tmp_path, name, "list", **options)
    if declared:
        trainer.model.config.keys_to_ignore_at_inference = ["past_key_values"]  # as until transformers 5.23
        trainer = Trainer(
            trainer.model, trainer.args, eval_dataset=trainer.eval_dataset, compute_metrics=options["compute_metrics"]
        )
    assert trainer.evaluate(ignore_keys=ignore)["eval_m"] == 1.0
    seen.append(trainer.predict(trainer.eval_dataset, ignore_keys=ignore).predictions)
    for predictions in seen:
        logits, *others = predictions if isinstance(predictions, tuple) else (predictions,)
        assert logits.shape[::2] == (7, 28)
        assert [value.shape[0] for value in others] == (
            [7] if name == "t5" else []
        )  # T5 also returns its encoder's states


def test_cache_in_the_outputs_of_a_task_is_left_out(tmp_path):
    task = WholeOutput(make_model("llama"))
    arguments = TrainingArguments(str(tmp_path), **run_options(use_cache=True, remove_unused_columns=False))
    predictions = Trainer(task, arguments).predict(make_rows("llama", 7)).predictions
    assert sorted(predictions) == ["logits", "loss"]


# -- tokenizers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def texts() -> Any:
    words = ["a b c", "d e", "f", "g h i j k", "a a", "b", "c d e f", "z y"]
    return datasets.Dataset.from_dict({"text": words, "label": [0, 1, 2, 0, 1, 2, 0, 1]})


def test_a_tokenizer_pads_and_is_saved_beside_the_model(tmp_path, texts):
    tokenizer = make_tokenizer()
    table = texts.map(lambda row: tokenizer(row["text"]))
    shapes = []

    class Watch(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            shapes.append(tuple(inputs["input_ids"].shape))
            assert ((inputs["input_ids"] == 0) == (inputs["attention_mask"] == 0)).all()
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    arguments = TrainingArguments(
        str(tmp_path), **run_options(max_steps=2, save_strategy="steps", save_steps=2, per_device_train_batch_size=8)
    )
    trainer = Watch(make_model("bert"), arguments, train_dataset=table, processing_class=tokenizer)
    trainer.train()
    assert shapes == [(8, 5), (8, 5)]
    predictions = trainer.predict(table.remove_columns("label")).predictions
    assert predictions.shape == (8, 3)

    trainer.save_model(str(tmp_path / "saved"))
    for folder in (tmp_path / "saved", tmp_path / "checkpoint-2"):
        reloaded = transformers.AutoTokenizer.from_pretrained(folder)
        assert reloaded("a z").input_ids == tokenizer("a z").input_ids
        model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
        assert same_weights(model, trainer.model)
