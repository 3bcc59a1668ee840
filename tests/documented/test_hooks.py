"""Underscored hooks that downstream trainers override: called through the instance, and `super()` works."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from support.resuming import without_times
from support.tiny import Net, Noisy, Rows, Stream, make_arguments, make_rows
from torch.utils.data import DataLoader, SequentialSampler

from hftrain import ConfigError, SavePolicy, Trainer, TrainerCallback

FULL: dict[str, Any] = {
    "max_steps": 6,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "save_strategy": "steps",
    "save_steps": 2,
    "load_best_model_at_end": True,
    "gradient_accumulation_steps": 2,
}


def make(kind: type[Trainer], folder: Path, data: Any = None, **options: Any) -> Trainer:
    data = make_rows() if data is None else data
    return kind(Net(), make_arguments(folder, **options), train_dataset=data, eval_dataset=make_rows(5))


def story(trainer: Trainer) -> list[dict[str, Any]]:
    """Return the history without what a clock decides."""
    return without_times(trainer.state.log_history)


HOOKS = (
    "_prepare_input", "_prepare_inputs", "_wrap_model", "_save", "_save_checkpoint", "_load_best_model",
    "_maybe_log_save_evaluate", "_get_train_sampler", "_get_eval_sampler", "_remove_unused_columns",
    "_set_signature_columns_if_needed", "_get_collator_with_removed_columns", "_nested_gather",
    "_determine_best_metric", "_rotate_checkpoints", "_load_from_checkpoint", "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler", "_get_output_dir", "_evaluate", "_get_num_items_in_batch", "_get_learning_rate",
    "autocast_smart_context_manager", "_get_dataloader",
    "_load_rng_state", "_prepare_context_parallel_inputs", "get_train_dataloader", "get_eval_dataloader",
    "get_test_dataloader", "log", "create_optimizer_and_scheduler", "create_optimizer", "create_scheduler",
    "compute_loss", "training_step", "prediction_step", "evaluate", "predict", "evaluation_loop", "get_batch_samples",
    "save_model", "compute_loss_context_manager", "get_decay_parameter_names", "set_initial_training_values",
    "get_optimizer_cls_and_kwargs",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    torch.manual_seed(3)
    trainer = make(Trainer, tmp_path_factory.mktemp("plain"), **FULL)
    trainer.train()
    return story(trainer)


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_called_and_passing_everything_on_changes_nothing(
    tmp_path: Path, hook: str, undisturbed: list[dict[str, Any]]
) -> None:
    calls: list[str] = []

    def override(*args: Any, **kwargs: Any) -> Any:
        calls.append(hook)
        return getattr(Trainer, hook)(*args, **kwargs)

    is_static = hook == "get_optimizer_cls_and_kwargs"
    kind = type("Overriding", (Trainer,), {hook: staticmethod(override) if is_static else override})
    torch.manual_seed(3)
    trainer = make(kind, tmp_path, **FULL)
    trainer.train()
    assert story(trainer) == undisturbed
    torch.manual_seed(4)
    resumed = make(kind, tmp_path, **{**FULL, "max_steps": 8})
    resumed.train(resume_from_checkpoint=True)
    resumed.predict(make_rows(3))
    assert calls
    assert resumed.state.global_step == 8


class RestoresItself(Trainer):
    """Reads the random numbers' file in the documented form, as axolotl does, and trains in a context of its own."""

    is_open = False

    def _load_rng_state(self, checkpoint: str | None) -> None:
        state = torch.load(Path(str(checkpoint), "rng_state.pth"), weights_only=True)
        random.setstate(state["python"])
        numpy.random.set_state(state["numpy"])
        torch.random.set_rng_state(state["cpu"])

    @contextmanager
    def opened(self) -> Iterator[None]:
        self.is_open = True
        yield
        self.is_open = False

    def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
        return self.opened, {**inputs, "x": inputs["x"] * 2}

    def compute_loss(self, model: Any, inputs: Any, **kwargs: Any) -> Any:
        assert self.is_open is model.training
        return super().compute_loss(model, inputs, **kwargs)


class Doubles(Trainer):
    def _prepare_inputs(self, inputs: Any) -> Any:
        factor = 2 if self.model.training else 1
        return super()._prepare_inputs({**inputs, "x": inputs["x"] * factor})


def test_own_random_numbers_and_contexts_act(tmp_path: Path) -> None:
    stories = []
    for kind, name in ((RestoresItself, "own"), (Doubles, "plain")):
        torch.manual_seed(3)
        make(kind, tmp_path / name, Noisy(make_rows()), **FULL).train()
        resumed = make(kind, tmp_path / name, Noisy(make_rows()), **{**FULL, "max_steps": 8})
        resumed.train(resume_from_checkpoint=True)
        stories.append(story(resumed))
    assert stories[0] == stories[1]


# -- _maybe_log_save_evaluate ----------------------------------------------------------------------------------------


def losses_of(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class LogsItself(Trainer):
    """Resets the loss in place, as the documented method does."""

    def _maybe_log_save_evaluate(self, tr_loss, *rest):  # type: ignore[no-untyped-def, override]
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            total = self._nested_gather(tr_loss).mean().item()
            tr_loss -= tr_loss
            self.log({"loss": total / (self.state.global_step - self._globalstep_last_logged)})
            self._total_loss_scalar += total
            self._globalstep_last_logged = self.state.global_step


def test_run_that_logs_itself_resumes_in_the_middle_of_a_window(tmp_path: Path) -> None:
    options = {"max_steps": 8, "logging_steps": 3, "save_strategy": "steps", "save_steps": 4, "save_total_limit": None}

    class LogsAndSaves(LogsItself):
        def _maybe_log_save_evaluate(self, *args):  # type: ignore[no-untyped-def, override]
            super()._maybe_log_save_evaluate(*args)
            if self.control.should_save:
                self._save_checkpoint(self.model_wrapped, None)
                self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    torch.manual_seed(3)
    whole = make(LogsAndSaves, tmp_path, **options)
    whole.train()
    resumed = make(LogsAndSaves, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert losses_of(resumed) == losses_of(whole)
    assert resumed._total_loss_scalar == whole._total_loss_scalar


# -- inputs ----------------------------------------------------------------------------------------------------------


def test_prepare_input_sees_every_value_of_a_nested_batch(tmp_path: Path) -> None:
    seen: list[type] = []

    class Sees(Trainer):
        def _prepare_input(self, data: Any) -> Any:
            seen.append(type(data))
            return super()._prepare_input(data)

    trainer = make(Sees, tmp_path)
    trainer.strategy.launch()
    batch = trainer._prepare_inputs({"x": torch.ones(2), "pair": (torch.ones(1), [3])})
    assert seen == [dict, torch.Tensor, tuple, torch.Tensor, list, int]
    assert batch["pair"] == (torch.ones(1), [3])


# -- wrapping --------------------------------------------------------------------------------------------------------


def test_wrap_model_compiles_around_the_strategys_wrapper(tmp_path: Path) -> None:
    class Compiles(Trainer):
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            wrapped = super()._wrap_model(model, training=training, dataloader=dataloader)
            return torch.compile(wrapped, backend="eager") if training else wrapped

    trainer = make(Compiles, tmp_path, max_steps=2)
    trainer.train()
    assert hasattr(trainer.model_wrapped, "_orig_mod")
    assert type(trainer.model) is Net
    trainer.evaluate()


def test_wrap_model_without_super_leaves_the_strategys_part_to_be_done(tmp_path: Path) -> None:
    class Keeps(Trainer):
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            return model

    trainer = make(Keeps, tmp_path, max_steps=2)
    trainer.train()
    assert trainer.optimizer is not None


def test_wrapper_that_hides_the_model_is_refused(tmp_path: Path) -> None:
    class Hides(Trainer):
        def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
            return torch.nn.Sequential(super()._wrap_model(model, training, dataloader))

    with pytest.raises(ConfigError, match="cannot look through it"):
        make(Hides, tmp_path, max_steps=2).train()


# -- data ------------------------------------------------------------------------------------------------------------


class Collected(Trainer):
    batches: list[torch.Tensor]

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.batches.append(inputs["x"])
        return super().compute_loss(model, inputs, *args, **kwargs)


class InOrder(Collected):
    def _get_train_sampler(self, train_dataset: Any) -> Any:  # type: ignore[override]
        assert len(super()._get_train_sampler(train_dataset)) == len(train_dataset)
        return SequentialSampler(train_dataset)


class InOrderAsBefore(Collected):
    def _get_train_sampler(self) -> Any:  # type: ignore[override]
        return SequentialSampler(super()._get_train_sampler().data_source)


@pytest.mark.parametrize("kind", [InOrder, InOrderAsBefore])
def test_own_sampler_in_both_forms(tmp_path: Path, kind: type[Collected]) -> None:
    kind.batches = []
    make(kind, tmp_path, num_train_epochs=1).train()
    assert torch.equal(torch.cat(kind.batches), torch.stack([row["x"] for row in make_rows()]))


class StreamWithLength(Stream):
    def __len__(self) -> int:
        return len(self.rows)


@pytest.mark.parametrize("stream", [Stream, StreamWithLength])
def test_stream_is_read_in_its_own_order(tmp_path: Path, stream: type[Stream]) -> None:
    """Nobody is asked for a sampler, and one that asks itself is told that there is none."""

    class Asked(Collected):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            raise AssertionError("asked for the order of a stream")

        def _get_eval_sampler(self, eval_dataset: Any = None) -> Any:
            raise AssertionError("asked for the order of a stream")

    Asked.batches, rows = [], make_rows(9)
    arguments = make_arguments(tmp_path, max_steps=3, eval_strategy="steps", eval_steps=3)
    trainer = Asked(Net(), arguments, train_dataset=stream(rows), eval_dataset=stream(rows))
    trainer.train()
    assert torch.equal(torch.cat(Asked.batches), torch.stack([row["x"] for row in [*rows, *rows]]))
    assert Trainer._get_train_sampler(trainer) is None
    assert Trainer._get_eval_sampler(trainer, trainer.eval_dataset) is None


@pytest.mark.parametrize("is_prepared", [False, True])
def test_own_loader_with_the_trainers_samplers_reads_what_its_own_does(tmp_path: Path, is_prepared: bool) -> None:
    """The documented way to change a loader: the samplers are asked for, and nothing of them is overridden."""
    if is_prepared:
        pytest.importorskip("accelerate")

    class OwnLoaders(Collected):
        def get_train_dataloader(self) -> Any:
            loader = DataLoader(self.train_dataset, batch_size=4, sampler=self._get_train_sampler())
            return self.accelerator.prepare(loader) if is_prepared else loader

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return DataLoader(self.eval_dataset, batch_size=4, sampler=self._get_eval_sampler(self.eval_dataset))

    found = []
    for kind in (Collected, OwnLoaders):
        kind.batches = []
        make(kind, tmp_path / kind.__name__, num_train_epochs=2, eval_strategy="epoch").train()
        found.append(torch.cat(kind.batches))
    assert torch.equal(*found)
    assert not torch.equal(found[0][: len(make_rows())], torch.stack([row["x"] for row in make_rows()]))


def test_evaluation_sampler_of_a_subclass(tmp_path: Path) -> None:
    class Backwards(Trainer):
        def _get_eval_sampler(self, eval_dataset: Any) -> Any:
            assert list(super()._get_eval_sampler(eval_dataset)) == list(range(len(eval_dataset)))
            return list(range(len(eval_dataset)))[::-1]

    rows = make_rows(5)
    found = make(Backwards, tmp_path).predict(rows).label_ids.tolist()
    assert found == [int(row["labels"]) for row in rows][::-1]


def with_extra(rows: Rows) -> Rows:
    return [{**row, "weight": torch.ones(())} for row in rows]


class Weighs(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        assert inputs.pop("weight").shape == inputs["labels"].shape
        return super().compute_loss(model, inputs, *args, **kwargs)


class KeepsWeight(Weighs):
    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = ["x", "labels", "weight"]


class KeepsWeightOnceMade(Weighs):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._signature_columns = ["x", "labels", "weight"]


@pytest.mark.parametrize("kind", [KeepsWeight, KeepsWeightOnceMade])
@pytest.mark.parametrize("has_init", [True, False])
def test_columns_of_a_subclass_are_kept(tmp_path: Path, kind: type[Trainer], has_init: bool) -> None:
    kind(
        None if has_init else Net(),
        make_arguments(tmp_path, max_steps=2),
        model_init=Net if has_init else None,
        train_dataset=with_extra(make_rows()),
    ).train()


def test_columns_are_kept_by_an_override_that_prunes_nothing(tmp_path: Path) -> None:
    class Keeps(Weighs):
        def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
            return dataset

        def _get_collator_with_removed_columns(self, data_collator: Any, description: str | None = None) -> Any:
            return data_collator

    make(Keeps, tmp_path, with_extra(make_rows()), max_steps=2).train()


# -- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_go_where_the_hook_says(tmp_path: Path) -> None:
    class Elsewhere(Trainer):
        def _get_output_dir(self, trial: Any = None) -> str:
            return str(self.output_dir / "run-1")

    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    make(Elsewhere, tmp_path, **options).train()
    assert (tmp_path / "run-1" / "checkpoint-2").is_dir()
    assert make(Elsewhere, tmp_path, **{**options, "max_steps": 4}).train(resume_from_checkpoint=True).global_step == 4


def test_rotation_may_be_taken_over(tmp_path: Path) -> None:
    class KeepsAll(Trainer):
        def _rotate_checkpoints(self, use_mtime: bool = False, output_dir: str | None = None) -> None:
            assert Path(output_dir or "") == self.output_dir

    make(KeepsAll, tmp_path, max_steps=3, save_strategy="steps", save_steps=1, save_total_limit=1).train()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3


def test_more_may_be_saved_and_loaded_with_the_optimizer(tmp_path: Path) -> None:
    class Counts(Trainer):
        own = 0

        def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
            super()._save_optimizer_and_scheduler(output_dir)
            (Path(output_dir) / "own.txt").write_text(str(self.state.global_step))

        def _load_optimizer_and_scheduler(self, checkpoint: str) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            self.own = int((Path(checkpoint) / "own.txt").read_text())

    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    make(Counts, tmp_path, **options).train()
    resumed = make(Counts, tmp_path, **{**options, "max_steps": 4})
    resumed.train(resume_from_checkpoint=True)
    assert resumed.own == 2


def test_weights_may_be_loaded_into_another_model(tmp_path: Path) -> None:
    trainer = make(Trainer, tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    other = Net()
    trainer._load_from_checkpoint(str(tmp_path / "checkpoint-2"), model=other)
    assert torch.equal(other.layers[0].weight, trainer.model.layers[0].weight)  # type: ignore[index]


def test_best_model_is_what_the_hook_decides(tmp_path: Path) -> None:
    class First(Trainer):
        def _determine_best_metric(self, metrics: Mapping[str, Any], trial: Any = None) -> bool:
            return super()._determine_best_metric({"eval_loss": self.state.global_step}, trial)

    trainer = make(First, tmp_path, **FULL)
    trainer.train()
    assert trainer.state.best_global_step == 2


def test_best_is_saved_when_the_hook_says_so(tmp_path: Path) -> None:
    class Always(Trainer):
        def _determine_best_metric(self, metrics: Mapping[str, Any], trial: Any = None) -> bool:
            super()._determine_best_metric(metrics, trial)
            return self.state.global_step == 4

    options = {**FULL, "save_strategy": "best", "load_best_model_at_end": False, "metric_for_best_model": "loss"}
    make(Always, tmp_path, **options).train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]


def test_evaluation_within_a_run_is_the_hooks(tmp_path: Path) -> None:
    class Falls(Trainer):
        def _evaluate(self, trial: Any = None, ignore_keys_for_eval: Any = None, skip_scheduler: bool = False) -> Any:
            metrics = super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)
            return {**metrics, "eval_loss": -self.state.global_step}

    trainer = make(Falls, tmp_path, **FULL)
    trainer.train()
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (6, -6)


def test_what_is_assigned_to_the_instance_acts_also_within_a_run(tmp_path: Path) -> None:
    early = {"compute_loss", "training_step", "log", "_prepare_input", "_maybe_log_save_evaluate"}
    late = {"_save_checkpoint", "_rotate_checkpoints", "_evaluate", "_determine_best_metric", "_load_best_model"}
    late |= {"_load_from_checkpoint", "_load_rng_state", "_save_optimizer_and_scheduler", "store_flos"}
    calls: set[str] = set()

    def watch(name: str) -> None:
        def watched(*args: Any, **kwargs: Any) -> Any:
            calls.add(name)
            return original(*args, **kwargs)

        original = getattr(trainer, name)
        setattr(trainer, name, watched)

    class Assigns(TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            [watch(name) for name in late]
            trainer._get_learning_rate = lambda: 0.5  # type: ignore[method-assign]
            trainer.processing_class = SimpleNamespace(save_pretrained=lambda folder: Path(folder, "tool").touch())

    make(Trainer, tmp_path, **FULL).train()
    trainer = make(Trainer, tmp_path, **{**FULL, "max_steps": 8, "logging_steps": 1})
    trainer.add_callback(Assigns())
    trainer.save_policy = SavePolicy(save_async=True)
    [watch(name) for name in early]
    trainer.train(resume_from_checkpoint=True)
    assert calls == early | late
    assert [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry][-2:] == [0.5, 0.5]
    names = {path.name for path in (tmp_path / "checkpoint-8").iterdir()}
    assert names & {"tool", "own_optimizers.pt"} == {"tool"}


@pytest.mark.parametrize("event", ["on_train_begin", "on_step_end"])
@pytest.mark.parametrize("name", ["optimizer", "lr_scheduler"])
def test_optimizer_or_schedule_replaced_during_a_run_is_refused(tmp_path: Path, name: str, event: str) -> None:
    """The run would step the one that it began with, and a resumed run could not begin with the other."""

    def replace(*args: Any, **kwargs: Any) -> None:
        sgd = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        constant = torch.optim.lr_scheduler.ConstantLR(trainer.optimizer, 1.0)
        setattr(trainer, name, sgd if name == "optimizer" else constant)

    callback = type("Replaces", (TrainerCallback,), {event: replace})()
    trainer = make(Trainer, tmp_path, max_steps=4, logging_steps=2)
    trainer.add_callback(callback)
    with pytest.raises(ConfigError, match=rf"another trainer\.{name}: it was replaced during the run"):
        trainer.train()


def test_step_of_a_save_is_read_from_its_folder(tmp_path: Path) -> None:
    found = []

    class Reads(Trainer):
        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            super()._save(output_dir, state_dict)
            found.append(int(str(output_dir).split("-")[-1]))

    make(Reads, tmp_path, max_steps=4, save_strategy="steps", save_steps=2).train()
    assert found == [2, 4]


def test_teacher_is_moved_to_a_device(tmp_path: Path) -> None:
    """As the usual distillation trainer does; an override of it, which nothing calls, is refused."""

    class Distils(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.teacher = Net()
            self._move_model_to_device(self.teacher, "meta")

    assert {parameter.device.type for parameter in make(Distils, tmp_path).teacher.parameters()} == {"meta"}  # type: ignore[attr-defined]

    class Moves(Trainer):
        def _move_model_to_device(self, model: Any, device: Any) -> None:
            """Nothing."""

    with pytest.raises(ConfigError, match="place_model_on_device"):
        make(Moves, tmp_path)
