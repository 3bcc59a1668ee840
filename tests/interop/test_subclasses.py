"""Small subclasses and callbacks of the kind that everybody has do here what they do with transformers' Trainer.

Each case builds the same thing on either library's classes. Losses, norms, rates, the whole log, what a case notes
while it runs, and the final weights are compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import make_model, make_rows, make_tokenizer, run_options  # noqa: E402
from support.resuming import without_times  # noqa: E402
from support.script_runs import assert_close  # noqa: E402

import hftrain  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("environment_stays")]

CASES: dict[str, Callable[..., dict[str, Any]]] = {}


def case(make: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Register a case: it is given a library and a list for notes, and returns what the Trainer is built from.

    Keys: ``trainer`` (the class), ``name`` (of the model), ``args`` (settings), and arguments of the constructor.
    """
    CASES[make.__name__] = make
    return make


def run(library: Any, make: Callable[..., dict[str, Any]], folder: Path) -> tuple[Any, list[Any]]:
    notes: list[Any] = []
    parts = make(library, notes)
    kind, name = parts.pop("trainer", library.Trainer), parts.pop("name", "bert")
    options = {"learning_rate": 1e-3, "eval_strategy": "epoch", **parts.pop("args", {})}
    # Even batches: where they are ragged, hftrain weighs them by their items.
    data = {"train_dataset": make_rows(name, 16), "eval_dataset": make_rows(name, 8, seed=2)}
    if name == "llama":
        data = {key: [{**row, "labels": row["input_ids"]} for row in rows] for key, rows in data.items()}
    arguments = library.TrainingArguments(str(folder), **run_options(**options))
    trainer = kind(make_model(name), arguments, **{**data, **parts})
    trainer.train()
    notes.append(without_times([trainer.evaluate()]))
    return trainer, notes


# -- losses ------------------------------------------------------------------------------------------------------------


@case
def own_loss_in_bf16(library: Any, notes: list[Any]) -> dict[str, Any]:
    class DistillingTrainer(library.Trainer):
        teacher = make_model("bert", seed=7).eval()

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            outputs = model(**inputs)
            with torch.no_grad():
                wanted = self.teacher(**inputs).logits
            notes.append(float(outputs.logits.detach().numpy().sum()))
            loss = outputs.loss + ((outputs.logits @ outputs.logits.T - wanted @ wanted.T) ** 2).mean()
            return (loss, outputs) if return_outputs else loss

    return {"trainer": DistillingTrainer, "args": {"bf16": True}}


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}


@case
def logged_parts(library: Any, notes: list[Any]) -> dict[str, Any]:
    class MultiTaskTrainer(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            norm = outputs["logits"].pow(2).mean()
            if self.model.training and self.state.global_step % 2 == 0:
                self.log({"class_loss": outputs["loss"].item(), "norm_loss": norm.item()})
            loss = outputs["loss"] + 0.1 * norm
            return (loss, outputs) if return_outputs else loss

    return {"trainer": MultiTaskTrainer}


@case
def own_label_smoothing(library: Any, notes: list[Any]) -> dict[str, Any]:
    class SmoothTrainer(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.get("labels")
            outputs = model(**inputs)
            loss = self.label_smoother(outputs, labels) if model.training else outputs["loss"]
            return (loss, outputs) if return_outputs else loss

    return {"trainer": SmoothTrainer, "args": {"label_smoothing_factor": 0.1}}


# -- steps -------------------------------------------------------------------------------------------------------------


@case
def adversarial_training(library: Any, notes: list[Any]) -> dict[str, Any]:
    class FGMTrainer(library.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, inputs)
            self.accelerator.backward(loss)
            weight = model.get_input_embeddings().weight
            backup = weight.data.clone()
            norm = weight.grad.norm()
            if norm != 0 and not torch.isnan(norm):
                weight.data.add_(0.5 * weight.grad / norm)
            with self.compute_loss_context_manager():
                self.accelerator.backward(self.compute_loss(model, inputs))
            weight.data = backup
            return loss.detach() / self.args.gradient_accumulation_steps

    return {"trainer": FGMTrainer}


@case
def sharpness_aware(library: Any, notes: list[Any]) -> dict[str, Any]:
    class SAMTrainer(library.Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            super().training_step(model, inputs, num_items_in_batch)
            shifts = []
            norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        shift = 0.05 * parameter.grad / (norm + 1e-12)
                        parameter.add_(shift)
                        shifts.append((parameter, shift))
            model.zero_grad()
            loss = super().training_step(model, inputs, num_items_in_batch)
            with torch.no_grad():
                for parameter, shift in shifts:
                    parameter.sub_(shift)
            return loss

    return {"trainer": SAMTrainer}


# -- optimizers --------------------------------------------------------------------------------------------------------


@case
def given_optimizer(library: Any, notes: list[Any]) -> dict[str, Any]:
    class GivenTrainer(library.Trainer):
        def create_optimizer_and_scheduler(self, num_training_steps):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.args.learning_rate, momentum=0.9)
            self.lr_scheduler = transformers.get_cosine_schedule_with_warmup(self.optimizer, 2, num_training_steps)

        if library is transformers:
            # transformers 5 documents the method to override, and no longer calls it.
            def create_optimizer(self, model=None):
                return None

            def create_scheduler(self, num_training_steps, optimizer=None):
                self.create_optimizer_and_scheduler(num_training_steps)
                return self.lr_scheduler

    return {"trainer": GivenTrainer}


# -- logs, metrics and files -------------------------------------------------------------------------------------------


@case
def own_log(library: Any, notes: list[Any]) -> dict[str, Any]:
    class LoggingTrainer(library.Trainer):
        def log(self, logs, start_time=None):
            if "loss" in logs:
                logs["perplexity"] = 2.0 ** logs["loss"]
            logs["rows"] = len(self.train_dataset)
            super().log(logs, start_time)

    return {"trainer": LoggingTrainer}


@case
def tampered_log(library: Any, notes: list[Any]) -> dict[str, Any]:
    class Renaming(library.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            if state.is_local_process_zero and logs and "loss" in logs:
                logs["doubled"] = 2 * logs["loss"]
                notes.append(sorted(logs))

    return {"callbacks": [Renaming()]}


@case
def own_prediction_step(library: Any, notes: list[Any]) -> dict[str, Any]:
    class CroppingTrainer(library.Trainer):
        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            inputs = self._prepare_inputs(inputs)
            with torch.no_grad():
                outputs = model(**inputs)
            if prediction_loss_only:
                return (outputs.loss.mean().detach(), None, None)
            return (outputs.loss.mean().detach(), outputs.logits[:, :2].softmax(-1), inputs["labels"].clamp(max=1))

    def compute_metrics(prediction):
        assert prediction.predictions.shape[1] == 2
        return {"mean": float(prediction.predictions.mean()), "ones": float(prediction.label_ids.mean())}

    return {"trainer": CroppingTrainer, "compute_metrics": compute_metrics}


@case
def own_prediction_step_in_bf16(library: Any, notes: list[Any]) -> dict[str, Any]:
    def preprocess(logits, labels):
        return torch.from_numpy(logits.numpy() + 1)

    return {**own_prediction_step(library, notes), "preprocess_logits_for_metrics": preprocess, "args": {"bf16": True}}


@case
def extra_metrics(library: Any, notes: list[Any]) -> dict[str, Any]:
    class ExtraTrainer(library.Trainer):
        def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
            metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            found = self.predict(self.eval_dataset, metric_key_prefix="probe")
            metrics[f"{metric_key_prefix}_spread"] = float(found.predictions.std())
            self.log({f"{metric_key_prefix}_spread": metrics[f"{metric_key_prefix}_spread"]})
            return metrics

    return {
        "trainer": ExtraTrainer,
        "args": {"metric_for_best_model": "spread", "greater_is_better": True, "save_strategy": "epoch",
                 "load_best_model_at_end": True},
    }  # fmt: skip


@case
def collected_predictions(library: Any, notes: list[Any]) -> dict[str, Any]:
    class CollectingTrainer(library.Trainer):
        def evaluation_loop(self, dataloader, description, prediction_loss_only=None, ignore_keys=None,
                            metric_key_prefix="eval"):  # fmt: skip
            output = super().evaluation_loop(dataloader, description, False, ignore_keys, metric_key_prefix)
            notes.append((output.num_samples, float(output.predictions.sum()), output.label_ids.tolist()))
            output.metrics[f"{metric_key_prefix}_sum"] = float(output.predictions.sum())
            return output

    def compute_metrics(prediction):
        return {"rows": len(prediction.inputs), "loss_spread": float(prediction.losses.std())}

    return {
        "trainer": CollectingTrainer,
        "compute_metrics": compute_metrics,
        "args": {"include_for_metrics": ["inputs", "loss"]},
    }


@case
def own_save_model(library: Any, notes: list[Any]) -> dict[str, Any]:
    class SavingTrainer(library.Trainer):
        def save_model(self, output_dir=None, _internal_call=False):
            super().save_model(output_dir, _internal_call)
            folder = Path(output_dir or self.args.output_dir)
            notes.append(_internal_call)
            (folder / "labels.txt").write_text("\n".join(map(str, range(self.model.config.num_labels))))

    return {"trainer": SavingTrainer, "args": {"save_strategy": "epoch"}, "processing_class": make_tokenizer()}


# -- callbacks ---------------------------------------------------------------------------------------------------------


@case
def sampled_text(library: Any, notes: list[Any]) -> dict[str, Any]:
    class Sampling(library.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.step = state.global_step

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            model, tokenizer = kwargs["model"], kwargs["processing_class"]
            model.eval()
            with torch.no_grad():
                ids = model.generate(torch.tensor([[2, 3, 4]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
            notes.append((self.step, tokenizer.decode(ids[0]), sorted(key for key in metrics if "second" not in key)))

    class Watching(library.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            notes.append(model.training)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    return {"name": "llama", "callbacks": [Sampling()], "processing_class": make_tokenizer(), "trainer": Watching}


@case
def scheduled_freezing(library: Any, notes: list[Any]) -> dict[str, Any]:
    class Unfreezing(library.TrainerCallback):
        def on_epoch_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            notes.append((round(state.epoch or 0), len(optimizer.param_groups)))
            for parameter in model.bert.parameters():
                parameter.requires_grad_((state.epoch or 0) >= 1)

    return {"callbacks": [Unfreezing()]}


@case
def callback_with_the_objects(library: Any, notes: list[Any]) -> dict[str, Any]:
    class Looking(library.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            notes.append([
                type(kwargs["model"]).__name__, len(kwargs["train_dataloader"]),
                len(kwargs["train_dataloader"].dataset),
                kwargs["lr_scheduler"].get_last_lr()[0], kwargs["optimizer"].param_groups[0]["lr"],
                state.max_steps, state.num_train_epochs, args.per_device_train_batch_size, state.logging_steps,
            ])  # fmt: skip

        def on_evaluate(self, args, state, control, **kwargs):
            notes.append(len(kwargs["eval_dataloader"]))

    return {"callbacks": [Looking()]}


@case
def callback_that_acts(library: Any, notes: list[Any]) -> dict[str, Any]:
    class Acting(library.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_evaluate = state.global_step in (1, 6)
            control.should_log = state.global_step % 2 == 1
            # At the stop as well: in hftrain every run that is stopped ends with a checkpoint.
            control.should_save = state.global_step in (3, 7)
            if state.global_step == 7:
                control.should_training_stop = True
            return control

        def on_save(self, args, state, control, **kwargs):
            notes.append(("saved", state.global_step))

    return {
        "callbacks": [Acting()],
        "args": {"eval_strategy": "no", "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 100},
    }


@case
def callback_that_evaluates_more(library: Any, notes: list[Any]) -> dict[str, Any]:
    class OnTrainingData(library.TrainerCallback):
        def __init__(self, trainer):
            self._trainer = trainer

        def on_epoch_end(self, args, state, control, **kwargs):
            if control.should_evaluate:
                before = copy.deepcopy(control)
                self._trainer.evaluate(eval_dataset=self._trainer.train_dataset, metric_key_prefix="train")
                return before
            return None

    class Adding(library.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.add_callback(OnTrainingData(self))

    return {"trainer": Adding, "compute_metrics": accuracy}


@case
def probed_gradients(library: Any, notes: list[Any]) -> dict[str, Any]:
    class Probing(library.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            notes.append(float(model.classifier.weight.grad.detach().norm()))

        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            notes.append(float(model.classifier.weight.detach().norm()))

    return {"callbacks": [Probing()], "args": {"max_grad_norm": 0.1}}


@pytest.mark.parametrize("name", CASES)
def test_subclass(tmp_path: Path, name: str) -> None:
    ours, noted = run(hftrain, CASES[name], tmp_path / "ours")
    theirs, also_noted = run(transformers, CASES[name], tmp_path / "theirs")
    histories = [without_times(trainer.state.log_history) for trainer in (ours, theirs)]
    for history in histories:
        for entry in history:
            entry.pop("total_flos", None)  # transformers 5 estimates it for its own models
    assert_close(*histories, "log_history", 1e-5)
    assert_close(noted, also_noted, "notes", 1e-4)
    for key, value in theirs.model.state_dict().items():
        torch.testing.assert_close(ours.model.state_dict()[key], value, rtol=1e-4, atol=1e-5)
    own = ("manifest.json", "journal.jsonl")
    written = [
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name not in own}
        for folder in (tmp_path / "ours", tmp_path / "theirs")
    ]
    assert written[0] == written[1]
