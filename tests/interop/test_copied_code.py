"""Code copied from transformers into a subclass does here what it does there: the names it uses act."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import make_model, make_rows, run_options  # noqa: E402
from support.resuming import without_times  # noqa: E402
from support.script_runs import assert_close  # noqa: E402

import hftrain  # noqa: E402

pytestmark = [pytest.mark.interop, pytest.mark.usefixtures("environment_stays")]

LIBRARIES = (transformers, hftrain)


def build(library: Any, folder: Path, kind: Any = None, name: str = "bert", **options: Any) -> Any:
    """Return a Trainer of a class made with either library; `options` are settings, or parts of the Trainer."""
    names = ("callbacks", "compute_metrics")
    parts = {part: options.pop(part) for part in names if part in options}
    arguments = options.pop("arguments", library.TrainingArguments)
    settings = run_options(**{"learning_rate": 1e-3, **options})
    data = {"train_dataset": make_rows(name, 16), "eval_dataset": make_rows(name, 8, seed=2)}
    return (kind or library.Trainer)(make_model(name), arguments(str(folder), **settings), **data, **parts)


def history(trainer: Any) -> list[dict[str, Any]]:
    """Return the log; `train_loss` of a resumed run is that of the whole run in hftrain."""
    left_out = ("total_flos", "train_loss")
    entries = without_times(trainer.state.log_history)
    return [{name: value for name, value in entry.items() if name not in left_out} for entry in entries]


def both(folder: Path, run: Callable[[Any, Path], Any]) -> tuple[Any, Any]:
    """Return what a run gives with transformers' Trainer and with hftrain's."""
    theirs, ours = (run(library, folder / library.__name__) for library in LIBRARIES)
    return ours, theirs


def assert_same(folder: Path, run: Callable[[Any, Path], Any], rel: float = 1e-5) -> Any:
    ours, theirs = both(folder, run)
    assert_close(ours, theirs, run.__name__, rel)
    return ours


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_gen_kwargs_hold_what_the_arguments_say(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> list[Any]:
        seen: list[Any] = []

        class Chatting(library.Seq2SeqTrainer):
            def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None, **options):
                options = self._gen_kwargs.copy()
                if options.get("max_length") is None and options.get("max_new_tokens") is None:
                    options["max_length"] = 10
                tokens = self.model.generate(input_ids=inputs["input_ids"], **options)
                seen.append([sorted(options), list(tokens.shape)])
                return None, tokens, inputs["labels"]

        settings = {"predict_with_generate": True, "generation_max_length": 6, "generation_num_beams": 2}
        trainer = build(
            library, folder, Chatting, "t5", arguments=library.Seq2SeqTrainingArguments, **settings,
            compute_metrics=lambda prediction: {"length": float(prediction.predictions.shape[1])},
        )  # fmt: skip
        for given in ({}, {"max_new_tokens": 3}, {"max_length": 5, "num_beams": 1}):
            trainer.evaluate(**given)
        trainer.predict(trainer.eval_dataset)
        return seen

    assert assert_same(tmp_path, run)[0] == [["max_length", "num_beams"], [4, 6]]


@pytest.mark.parametrize("when", ["at once", "on_train_begin"])
def test_assigned_clip_grad_norm_clips(tmp_path: Path, when: str) -> None:
    def run(library: Any, folder: Path) -> Any:
        def clip(parameters, max_norm, norm_type=2.0):
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.clamp_(-1e-4, 1e-4)
            return torch.tensor(0.5)

        class Later(library.TrainerCallback):
            def on_train_begin(self, args, state, control, **kwargs):
                trainer.accelerator.clip_grad_norm_ = clip

        trainer = build(
            library, folder, optim="sgd", learning_rate=10.0, callbacks=[Later] if when != "at once" else []
        )
        if when == "at once":
            trainer.accelerator.clip_grad_norm_ = clip
        trainer.train()
        return history(trainer)

    assert assert_same(tmp_path, run, 1e-4)[0]["grad_norm"] == 0.5


def test_assigned_backward_is_called(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        trainer = build(library, folder, optim="sgd", learning_rate=0.1)
        backward = trainer.accelerator.backward
        trainer.accelerator.backward = lambda loss, **options: backward(2 * loss, **options)
        trainer.train()
        return history(trainer)

    assert_same(tmp_path, run, 1e-4)


def test_override_that_makes_the_accelerator_runs_in_the_constructor(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        class Scaling(library.Trainer):
            def create_accelerator_and_postprocess(self):
                super().create_accelerator_and_postprocess()
                self.is_deepspeed_enabled = getattr(self.accelerator.state, "deepspeed_plugin", None) is not None
                self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None
                self.gather_function = self.accelerator.gather_for_metrics
                self.scale = 3.0

            def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
                loss = getattr(self, "scale", 0.0) * super().compute_loss(model, inputs)
                return (loss, None) if return_outputs else loss

        trainer = build(library, folder, Scaling)
        assert trainer.scale == 3.0
        trainer.train()
        return history(trainer)

    assert_same(tmp_path, run, 1e-4)


def test_evaluation_on_start_is_part_of_a_resumed_run_and_chooses_nothing(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        def make() -> Any:
            options = {"save_strategy": "epoch", "eval_strategy": "epoch", "eval_on_start": True, "learning_rate": 0.1}
            plateau = {"lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}
            return build(library, folder, num_train_epochs=3, **options, **plateau)

        make().train()
        resumed = make()
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-8"))
        return [history(resumed), resumed.state.best_global_step]

    found = assert_same(tmp_path, run, 1e-3)[0]
    assert [entry["step"] for entry in found if "eval_loss" in entry] == [0, 4, 8, 8, 12]


def test_arguments_whose_should_save_is_false_save_nothing(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        saved: list[int] = []

        @dataclasses.dataclass
        class Never(library.TrainingArguments):
            @property
            def should_save(self):
                return False

        class Saving(library.TrainerCallback):
            def on_save(self, args, state, control, **kwargs):
                saved.append(state.global_step)

        build(library, folder, save_strategy="epoch", arguments=Never, callbacks=[Saving]).train()
        return [saved, sorted({path.name for path in folder.rglob("*") if path.is_file()})]

    ours, theirs = both(tmp_path, run)
    assert (ours, theirs) == ([[4, 8], []], [[4, 8], ["rng_state.pth"]])


def test_optimizer_is_found_in_its_own_wrapper(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        seen: list[str] = []

        class Looking(library.TrainerCallback):
            def on_step_end(self, args, state, control, optimizer=None, **kwargs):
                seen.append(type(optimizer.optimizer).__name__)

        trainer = build(library, folder, callbacks=[Looking])
        trainer.train()
        return [seen, len(trainer.optimizer.optimizer.param_groups)]

    assert_same(tmp_path, run)


@pytest.mark.parametrize("is_given", [True, False])
def test_metrics_may_be_any_sign_for_an_own_evaluation_loop(tmp_path: Path, is_given: bool) -> None:
    def run(library: Any, folder: Path) -> Any:
        class Own(library.Trainer):
            def evaluation_loop(self, dataloader, description, prediction_loss_only=None, ignore_keys=None,
                                metric_key_prefix="eval"):  # fmt: skip
                metrics = {f"{metric_key_prefix}_own": float(self.compute_metrics)}
                return transformers.trainer_utils.EvalLoopOutput(None, None, metrics, 8)

        trainer = build(library, folder, Own, eval_strategy="epoch", **{"compute_metrics": True} if is_given else {})
        trainer.compute_metrics = True
        trainer.train()
        return history(trainer)

    assert_same(tmp_path, run)


def test_schedule_of_an_override_is_made_again_by_the_next_training(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        class Stepping(library.Trainer):
            def create_scheduler(self, num_training_steps, optimizer=None):
                self.lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer or self.optimizer, 2, gamma=0.5)
                self._created_lr_scheduler = True
                return self.lr_scheduler

        trainer = build(library, folder, Stepping)
        trainer.train()
        trainer.optimizer = None
        trainer.train()
        return [entry["learning_rate"] for entry in history(trainer) if "learning_rate" in entry]

    assert assert_same(tmp_path, run)[0] == 1e-3


# -- an own _save_checkpoint -------------------------------------------------------------------------------------------


def copied(library: Any, notes: list[Any], *, writes_itself: bool = False) -> Any:
    """Return a Trainer class with `_save_checkpoint` as code for transformers 4 has it."""

    class Copied(library.Trainer):
        def _save_checkpoint(self, model, trial, metrics=None):
            notes.append((self.state.global_step, self.control.should_save))
            if self.hp_search_backend is None and trial is None:
                self.store_flos()
            run_dir = self._get_output_dir(trial=trial)
            folder = os.path.join(run_dir, f"checkpoint-{self.state.global_step}")
            self.save_model(folder, _internal_call=True)
            if writes_itself:
                numbers = {"python": random.getstate(), "numpy": numpy.random.get_state()}
                numbers["cpu"] = torch.random.get_rng_state()
                parts = {"optimizer.pt": self.optimizer.state_dict(), "scheduler.pt": self.lr_scheduler.state_dict()}
                for name, part in {**parts, "rng_state.pth": numbers}.items():
                    torch.save(part, os.path.join(folder, name))
            elif not self.args.save_only_model:
                self._save_optimizer_and_scheduler(folder)
                self._save_scaler(folder)
                self._save_rng_state(folder)
            if self.state.best_global_step:
                best = os.path.join(run_dir, f"checkpoint-{self.state.best_global_step}")
                if os.path.exists(best):
                    self.state.best_model_checkpoint = best
            if self.args.should_save:
                self.state.stateful_callbacks["TrainerControl"] = self.control.state()
                self.state.save_to_json(os.path.join(folder, "trainer_state.json"))
            if not self.args.should_save:
                return
            if hasattr(self, "_rotate_checkpoints"):
                self._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
            else:
                limits = {"save_total_limit": self.args.save_total_limit, "use_mtime": True}
                best = {"best_model_checkpoint": self.state.best_model_checkpoint}
                transformers.trainer_utils.rotate_checkpoints(output_dir=run_dir, **limits, **best)

    return Copied


def save_and_resume(library: Any, folder: Path, *, resume: Any = None, **options: Any) -> Any:
    notes: list[Any] = []

    class Saving(library.TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            notes.append(("on_save", state.global_step, control.should_save))

    kind = copied(library, notes, writes_itself=options.pop("writes_itself", False))
    trainer = build(library, folder, kind, callbacks=[Saving], **options)
    trainer.train()
    if resume is not None:
        notes.append("resume")
        trainer = build(library, folder, kind, callbacks=[Saving], **options)
        trainer.train(resume_from_checkpoint=resume if resume is True else str(folder / resume))
    return [notes, history(trainer), sorted(path.name for path in folder.glob("checkpoint-*"))]


@pytest.mark.parametrize(
    "options",
    [
        {"resume": "checkpoint-4", "save_strategy": "epoch"},
        {"resume": "checkpoint-3", "save_strategy": "steps", "save_steps": 3},
        {"resume": "checkpoint-3", "save_strategy": "steps", "save_steps": 3, "writes_itself": True},
        {"save_strategy": "epoch", "num_train_epochs": 4, "save_total_limit": 2},
        {"save_strategy": "epoch", "num_train_epochs": 4, "save_total_limit": 1, "eval_strategy": "epoch",
         "load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.3},
    ],
)  # fmt: skip
def test_own_save_checkpoint_saves_resumes_and_rotates(tmp_path: Path, options: dict[str, Any]) -> None:
    assert_same(tmp_path, lambda library, folder: save_and_resume(library, folder, **options), 1e-3)


def test_save_checkpoint_that_keeps_only_an_adapter(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        class AdapterOnly(library.Trainer):
            def _save_checkpoint(self, model, trial, metrics=None):
                folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
                if self.args.local_rank in (0, -1):
                    self.model.config.save_pretrained(folder)
                    torch.save({"weight": self.model.classifier.weight}, folder / "mm_projector.bin")

            def _save(self, output_dir=None, state_dict=None):
                raise AssertionError("nothing else is saved")

        trainer = build(library, folder, AdapterOnly, save_strategy="steps", save_steps=3, save_total_limit=1)
        trainer.train()
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.bin"))

    assert assert_same(tmp_path, run) == [f"checkpoint-{step}/mm_projector.bin" for step in (3, 6, 8)]


def test_save_checkpoint_that_keeps_only_the_best_in_the_output_folder(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        class BestOnly(library.Trainer):
            def evaluate(self, *args, **kwargs):
                self.last = super().evaluate(*args, **kwargs)
                return self.last

            def _save_checkpoint(self, model, trial, metrics=None):
                loss = self.last["eval_loss"]
                if self.state.best_model_checkpoint is None or loss < self.state.best_metric:
                    self.save_model(self.args.output_dir)
                    self.state.best_metric, self.state.best_model_checkpoint = loss, self.args.output_dir

        options = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.1}
        strategies = {"save_strategy": "epoch", "eval_strategy": "epoch", "num_train_epochs": 3}
        trainer = build(library, folder, BestOnly, **strategies, **options)
        trainer.train()
        return [history(trainer), without_times([trainer.evaluate()])]

    assert_same(tmp_path, run, 1e-3)


# -- names -------------------------------------------------------------------------------------------------------------


def test_names_that_copied_code_reads(tmp_path: Path) -> None:
    trainer = build(hftrain, tmp_path, save_strategy="epoch", save_total_limit=None)
    trainer.train()
    assert not any((trainer.use_apex, trainer.use_cpu_amp, trainer.do_grad_scaling, trainer.is_fsdp_xla_enabled))
    assert trainer.hp_name is trainer.sharded_ddp is trainer.scaler is trainer.neftune_hook_handle is None
    assert [Path(path).name for path in trainer._sorted_checkpoints()] == ["checkpoint-4", "checkpoint-8"]
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-4")
    assert [Path(path).name for path in trainer._sorted_checkpoints(use_mtime=True)] == ["checkpoint-4", "checkpoint-8"]
    assert trainer._pad_across_processes(torch.ones(2, 3)).shape == (2, 3)
    assert isinstance(trainer._gather_and_numpify(torch.ones(2), "losses"), numpy.ndarray)
    trainer.is_deepspeed_enabled = trainer.is_fsdp_enabled = False
    with pytest.raises(hftrain.ConfigError, match="is_fsdp_enabled to True"):
        trainer.is_fsdp_enabled = True


def test_memory_tracker_of_a_copied_predict_adds_what_the_trainer_reports(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        class Tracking(library.Trainer):
            def predict(self, test_dataset, ignore_keys=None, metric_key_prefix="test"):
                self._memory_tracker.start()
                output = super().predict(test_dataset, ignore_keys, metric_key_prefix)
                self._memory_tracker.stop_and_update_metrics(output.metrics)
                return output

        trainer = build(library, folder, Tracking, skip_memory_metrics=False)
        metrics = trainer.predict(trainer.eval_dataset).metrics
        return sorted(name for name in metrics if "mem" in name and "before" not in name)

    assert_same(tmp_path, run)


def test_create_optimizer_takes_a_model(tmp_path: Path) -> None:
    def run(library: Any, folder: Path) -> Any:
        class Passing(library.Trainer):
            def create_optimizer(self, model=None):
                return super().create_optimizer(model=model)

        trainer = build(library, folder, Passing)
        trainer.train()
        return [history(trainer), len(build(library, folder).create_optimizer(trainer.model).param_groups)]

    assert_same(tmp_path, run, 1e-4)


# -- before a run ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bf16", [False, True])
def test_steps_can_be_called_before_a_run(tmp_path: Path, bf16: bool) -> None:
    def run(library: Any, folder: Path) -> Any:
        trainer = build(library, folder, bf16=bf16)
        batch = trainer.data_collator(trainer.train_dataset[:4])
        prepared = trainer._prepare_inputs(dict(batch))
        trainer.model.eval()
        loss, logits, labels = trainer.prediction_step(trainer.model, dict(batch), False)
        found = [sorted(prepared), float(loss), list(logits.shape), labels.tolist()]
        trainer.current_gradient_accumulation_steps = 1  # transformers sets it in its loop only
        found.append(float(trainer.training_step(trainer.model, dict(batch))))
        return [*found, float(trainer.model.classifier.weight.grad.norm())]

    assert_same(tmp_path, run, 2e-2 if bf16 else 1e-4)


@pytest.mark.parametrize("part", ["args", "attributes"])
def test_callback_state_may_have_one_part_only(tmp_path: Path, part: str) -> None:
    def run(library: Any, folder: Path) -> Any:
        seen: list[int] = []
        base = transformers.trainer_callback.ExportableState if library is transformers else hftrain.ExportableState

        class Counting(library.TrainerCallback, base):
            def __init__(self, number=3):
                self.number = number

            def on_train_begin(self, args, state, control, **kwargs):
                seen.append(self.number)

            def state(self):
                return {part: {"number": self.number + 1}}

        for resume in (None, str(folder / "checkpoint-4")):
            options = {"save_strategy": "epoch", "restore_callback_states_from_checkpoint": True}
            build(library, folder, callbacks=[Counting()], **options).train(resume_from_checkpoint=resume)
        return seen

    assert assert_same(tmp_path, run) == [3, 4]


def test_invalid_generation_config_is_refused_when_the_trainer_is_built(tmp_path: Path) -> None:
    config = transformers.GenerationConfig()
    config.do_sample, config.temperature = False, 0.3
    settings = {"predict_with_generate": True, "generation_config": config}
    for library, error in ((transformers, ValueError), (hftrain, hftrain.ConfigError)):
        with pytest.raises(error, match="temperature"):
            build(library, tmp_path, library.Seq2SeqTrainer, "t5", arguments=library.Seq2SeqTrainingArguments,
                  **settings)  # fmt: skip


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end", "on_evaluate", "on_save"])
def test_memory_error_in_a_callback_ends_the_run(tmp_path: Path, event: str) -> None:
    def run(library: Any, folder: Path) -> Any:
        def fail(self, args, state, control, **kwargs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

        failing = type("Failing", (library.TrainerCallback,), {event: fail})
        strategies = {"save_strategy": "epoch", "eval_strategy": "epoch"}
        with pytest.raises(torch.OutOfMemoryError) as caught:
            build(library, folder, callbacks=[failing], **strategies).train()
        return str(caught.value)

    assert_same(tmp_path, run)
