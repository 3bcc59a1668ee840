"""Each documented setting of evaluation and prediction, by a test that fails where the setting is ignored."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.resuming import StopAt
from support.tiny import Net, Noisy, Rows, Task, make_arguments, make_rows, share, train
from torch import nn

from hftrain import (
    ConfigError,
    EvalLoopOutput,
    EvalPrediction,
    TaskError,
    Trainer,
    set_seed,
)
from hftrain.evaluation.preparation import full_eval_dtype


def numbers(metrics: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is a time."""
    return {name: value for name, value in metrics.items() if not name.endswith(("runtime", "second", "time"))}


# -- what is kept ----------------------------------------------------------------------------------------------------


def test_prediction_loss_only_keeps_no_predictions(tmp_path: Path) -> None:
    for loss_only in (False, True):
        trainer = Trainer(Net(), make_arguments(tmp_path, prediction_loss_only=loss_only))
        output = trainer.predict(make_rows(5))
        assert (output.predictions is None) == (output.label_ids is None) == loss_only
        assert "test_loss" in output.metrics


def test_metrics_that_the_loss_alone_rules_out_are_warned_of(tmp_path: Path) -> None:
    args = make_arguments(tmp_path, prediction_loss_only=True)
    with pytest.warns(UserWarning, match="compute_metrics is never called with prediction_loss_only=True"):
        trainer = Trainer(Net(), args, compute_metrics=share)
    assert "eval_share" not in trainer.evaluate(make_rows(5))


def test_evaluation_without_metrics_keeps_no_predictions_unless_asked(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path))
    seen = []
    step = trainer.prediction_step

    def look(model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
        seen.append(prediction_loss_only)
        return step(model, inputs, prediction_loss_only, ignore_keys)

    trainer.prediction_step = look  # type: ignore[method-assign]
    trainer.evaluate(make_rows(2))
    loader = trainer.get_eval_dataloader(make_rows(5))
    assert trainer.evaluation_loop(loader, "mine", prediction_loss_only=False).predictions.shape == (5, 3)
    assert trainer.evaluation_loop(loader, "mine", prediction_loss_only=True).predictions is None
    assert seen == [True, False, False, True, True]


@pytest.mark.parametrize("is_labelled", [True, False])
def test_evaluation_loop_serves_data_with_and_without_labels(tmp_path: Path, is_labelled: bool) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path))
    rows = make_rows(5) if is_labelled else [{"x": row["x"]} for row in make_rows(5)]
    output = trainer.evaluation_loop(trainer.get_test_dataloader(rows), "mine", metric_key_prefix="own")
    assert isinstance(output, EvalLoopOutput)
    assert output.num_samples == 5
    assert ("own_loss" in output.metrics) == (output.label_ids is not None) == is_labelled


class Autoencoder(torch.nn.Linear):
    """Returns a loss without labels."""

    def forward(self, x: torch.Tensor) -> Any:
        loss = (super().forward(x) - x).square().mean()
        return {"dict": {"loss": loss, "y": x}, "tuple": (loss, x), "tensor": loss}[self.kind]


@pytest.mark.parametrize("kind", ["dict", "tuple", "tensor"])
def test_loss_of_a_model_without_labels_is_that_of_its_samples(tmp_path: Path, kind: str) -> None:
    model, rows = Autoencoder(4, 4), [{"x": row["x"]} for row in make_rows(5)]
    model.kind = kind
    best = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = train(
        tmp_path, model, train_dataset=rows, eval_dataset=rows, max_steps=2, load_best_model_at_end=True, **best
    )
    x = torch.stack([row["x"] for row in rows])
    expected = (torch.nn.Linear.forward(model, x) - x).square().mean().detach()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert (trainer.predict(rows).predictions is None) == (kind == "tensor")


def test_prediction_step_gives_loss_logits_and_labels(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path))
    trainer.evaluate(make_rows(1))
    batch = {"x": torch.ones(2, 4), "labels": torch.tensor([0, 1])}
    loss, logits, labels = trainer.prediction_step(trainer.model, dict(batch), False)
    assert loss is not None
    assert not loss.requires_grad
    assert (logits.shape, labels.tolist()) == ((2, 3), [0, 1])
    assert trainer.prediction_step(trainer.model, dict(batch), True)[1:] == (None, None)
    assert trainer.prediction_step(trainer.model, {"x": torch.ones(2, 4)}, False)[0] is None


class Config:
    keys_to_ignore_at_inference = ("memory",)


class Remembers(nn.Module):
    """Return a memory beside the logits, by a config that says that it is no prediction."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.net = Net()
        self.config = config

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        outputs = self.net(x, labels)
        named = {"logits": outputs[-1], "memory": x}
        return named if labels is None else {"loss": outputs[0], **named}


def test_ignored_outputs_default_to_the_configs(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path)
    assert isinstance(Trainer(Remembers(), arguments).predict(make_rows(5)).predictions, tuple)
    trainer = Trainer(Remembers(Config()), arguments)
    assert trainer.predict(make_rows(5)).predictions.shape == (5, 3)
    assert isinstance(trainer.predict(make_rows(5), ignore_keys=[]).predictions, tuple)
    assert trainer.predict(make_rows(5), ignore_keys=["logits"]).predictions.shape == (5, 4)


def test_ignored_outputs_reach_evaluations_of_a_training(tmp_path: Path) -> None:
    shapes = []

    def look(prediction: EvalPrediction) -> dict[str, float]:
        shapes.append(getattr(prediction.predictions, "shape", None))
        return {}

    trainer = Trainer(
        Remembers(), make_arguments(tmp_path, eval_strategy="epoch", num_train_epochs=1), train_dataset=make_rows(4),
        eval_dataset=make_rows(5), compute_metrics=look,
    )  # fmt: skip
    trainer.train(ignore_keys_for_eval=["memory"])
    trainer.train()
    assert shapes == [(5, 3), None]


def test_labels_are_padded_like_predictions_and_the_hook_sees_both(tmp_path: Path) -> None:
    seen = []

    class Tags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
            logits = torch.stack([x, -x], -1) * self.scale
            return {"logits": logits} if labels is None else {"loss": logits.mean(), "logits": logits}

    def preprocess(logits: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        seen.append(None if labels is None else (tuple(logits.shape), tuple(labels.shape)))
        return logits.argmax(-1)

    rows = [{"x": torch.ones(n), "labels": torch.ones(n, dtype=torch.int64)} for n in (2, 3)]
    trainer = Trainer(
        Tags(), make_arguments(tmp_path, per_device_eval_batch_size=1), preprocess_logits_for_metrics=preprocess,
        compute_metrics=lambda p: {"wide": float(p.predictions.shape[1] + p.label_ids.shape[1])},
    )  # fmt: skip
    output = trainer.predict(rows)
    assert output.predictions.tolist() == [[0, 0, -100], [0, 0, 0]]
    assert output.label_ids.tolist() == [[1, 1, -100], [1, 1, 1]]
    assert output.label_ids.dtype == numpy.int64
    assert trainer.evaluate(rows)["eval_wide"] == 6
    trainer.predict([{"x": torch.ones(2)}])
    assert seen == [((1, 2, 2), (1, 2)), ((1, 3, 2), (1, 3))] * 2 + [None]


@pytest.mark.parametrize("outputs", ["rank", "keys"])
def test_outputs_that_cannot_be_joined_are_named(tmp_path: Path, outputs: str) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.scale = 0, nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            self.calls += 1
            if self.calls == 1:
                return {"a": x, "b": x}
            return {"a": x[:, 0], "b": x} if outputs == "rank" else {"a": x, "c": x, "d": x}

    arguments = make_arguments(tmp_path, per_device_eval_batch_size=1)
    with pytest.raises(TaskError, match="were to be joined"):
        Trainer(Changes(), arguments).predict([{"x": torch.ones(4)}] * 2)


def test_metrics_of_an_evaluation_are_the_documented_ones(tmp_path: Path) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), compute_metrics=share, train_dataset=make_rows(4))
    speeds = {"eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}
    documented = {"eval_loss", "eval_share", "epoch", *speeds}
    assert trainer.evaluate(make_rows(9)).keys() == documented
    trainer.train()
    assert trainer.evaluate(make_rows(9)).keys() == documented | {"epoch"}


def test_numbers_of_an_evaluation_are_those_of_its_samples_and_its_time(tmp_path: Path) -> None:
    model, rows = Net(), make_rows(9)
    arguments = make_arguments(tmp_path, jit_mode_eval=True, skip_memory_metrics=False, num_train_epochs=2)
    trainer = Trainer(model, arguments, compute_metrics=share, train_dataset=make_rows(4))
    trainer.train()
    start = time.perf_counter()
    metrics = trainer.evaluate(rows)
    taken = time.perf_counter() - start
    batch = torch.utils.data.default_collate(rows)
    loss, logits = model.eval()(**batch)
    assert metrics.pop("eval_loss") == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.pop("eval_share") == pytest.approx((logits.argmax(-1) == batch["labels"]).float().mean().item())
    assert metrics.pop("epoch") == 2
    runtime = metrics.pop("eval_runtime")
    assert 0 < metrics.pop("eval_jit_compilation_time") < taken
    assert 0 < runtime < taken
    assert metrics.pop("eval_samples_per_second") * runtime == pytest.approx(9, rel=0.05)
    assert metrics.pop("eval_steps_per_second") * runtime == pytest.approx(3, rel=0.05)
    assert metrics.keys() == {"eval_mem_cpu_alloc_delta", "eval_mem_cpu_peaked_delta"}


# -- use_legacy_prediction_loop --------------------------------------------------------------------------------------


def test_legacy_loop_is_refused_with_its_successor(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"use_legacy_prediction_loop=True.*evaluation_loop"):
        Trainer(Net(), make_arguments(tmp_path, use_legacy_prediction_loop=True)).evaluate(make_rows(2))

    class Old(Trainer):
        def prediction_loop(self) -> None: ...

    with pytest.warns(UserWarning, match=r"prediction_loop.*Override evaluation_loop"):
        trainer = Old(Net(), make_arguments(tmp_path))
    del Old.prediction_loop
    with pytest.raises(AttributeError, match="Override evaluation_loop, or call it"):
        trainer.prediction_loop()


# -- past_index ------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """Count in a memory how many batches it has seen since the memory began."""

    def __init__(self, kind: str = "tuple") -> None:
        super().__init__()
        self.kind, self.scale = kind, nn.Parameter(torch.ones(()))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, mems: Any = None) -> Any:
        self.seen.append((self.training, 0.0 if mems is None else float(mems[0].mean())))
        assert mems is None or not mems[0].requires_grad
        memory = (self.scale * 0 + (torch.zeros(()) if mems is None else mems[0]) + 1,)
        outputs: dict[str, Any] = {"logits": x[:, :3] * self.scale, "mems": memory}
        if labels is not None:
            outputs = {"loss": outputs["logits"].pow(2).mean(), **outputs}
        return outputs if self.kind == "dict" else tuple(outputs.values())


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_memory_comes_back_and_begins_anew_with_each_epoch_and_evaluation(tmp_path: Path, kind: str) -> None:
    model = Recurrent(kind)
    arguments = make_arguments(tmp_path, past_index=2, eval_strategy="steps", eval_steps=2, num_train_epochs=2)
    trainer = Trainer(model, arguments, train_dataset=make_rows(12), eval_dataset=make_rows(8))
    trainer.train()
    training = [memory for is_training, memory in model.seen if is_training]
    # The evaluation between two steps leaves the training's memory alone.
    assert training == [0, 1, 2, 0, 1, 2]
    assert [memory for is_training, memory in model.seen if not is_training] == [0, 1] * 3
    assert trainer._trainer_parts.computing.past is None
    model.seen.clear()
    rows = [{"x": row["x"]} for row in make_rows(12)]
    with nullcontext() if kind == "dict" else pytest.warns(UserWarning, match="has no sample dimension"):
        trainer.predict(rows, ignore_keys=["mems"] if kind == "dict" else None)
    assert [memory for _, memory in model.seen] == [0, 1, 2]


def test_memory_goes_on_after_a_resume(tmp_path: Path) -> None:
    model = Recurrent()
    options: dict[str, Any] = {"past_index": 2, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 50}
    for callbacks, resume in (([StopAt(2)], False), ([], True)):
        train(tmp_path, model, train_dataset=make_rows(16), callbacks=callbacks, **options, resume=resume)
    assert [memory for _, memory in model.seen] == [0, 1, 2, 3]


def test_memory_that_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes no argument called mems"):
        Trainer(Net(), make_arguments(tmp_path, past_index=2))
    with pytest.raises(ConfigError, match="Cannot use past_index=2 with Task"):
        Trainer(Task(), make_arguments(tmp_path, past_index=2))
    with pytest.raises(ConfigError, match="jit_mode_eval=True"):
        Trainer(Recurrent(), make_arguments(tmp_path, past_index=2, jit_mode_eval=True))
    trainer = Trainer(Recurrent(), make_arguments(tmp_path, past_index=7), train_dataset=make_rows(4))
    with pytest.raises(TaskError, match="returned 3 outputs, and none at place 7"):
        trainer.train()

    class Pairs(Recurrent):
        def forward(self, x: Any, labels: Any = None, mems: Any = None) -> Any:
            return super().forward(x, labels, mems)

    data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8))
    with pytest.raises(TaskError, match=r"The batch is a (list|tuple), to which no 'mems' can be added"):
        train(tmp_path, Pairs(), train_dataset=data, data_collator=torch.utils.data.default_collate, past_index=2)


# -- bf16_full_eval, fp16_full_eval ----------------------------------------------------------------------------------


class Dtypes(Net):
    """Note the dtype it runs in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()
        self.register_buffer("table", torch.randn(3))
        self.tied = self.layers[0].weight

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.layers(x)
        self.seen.add((self.training, x.dtype, self.table.dtype, self.tied.dtype, logits.dtype))
        return (logits,) if labels is None else (nn.functional.cross_entropy(logits, labels), logits)


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize(("setting", "dtype"), [("bf16_full_eval", torch.bfloat16), ("fp16_full_eval", torch.float16)])
def test_full_evaluation_runs_in_that_dtype_and_puts_the_model_back(
    tmp_path: Path, setting: str, dtype: torch.dtype
) -> None:
    model = Dtypes()
    arguments = make_arguments(tmp_path, **{setting: True}, bf16=True)
    assert full_eval_dtype(arguments) is dtype
    trainer = Trainer(model, arguments, eval_dataset=make_rows(9))
    before = {name: (p, p.clone()) for name, p in model.named_parameters()}
    exact = Trainer(model, make_arguments(tmp_path)).evaluate(make_rows(9))["eval_loss"]
    model.seen.clear()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(exact, rel=0.05)
    output = trainer.predict(make_rows(9))
    assert model.seen == {(False, *[dtype] * 4)}
    assert output.predictions.dtype == (numpy.float32 if dtype is torch.bfloat16 else numpy.float16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype is torch.float32
        assert parameter is before[name][0]
        assert torch.equal(parameter, before[name][1])
    assert model.table.dtype is torch.float32
    assert model.tied is model.layers[0].weight


@pytest.mark.parametrize("setting", ["bf16_full_eval", "fp16_full_eval"])
def test_full_evaluations_change_no_bit_of_a_training(tmp_path: Path, setting: str) -> None:
    answers, seen = [], []
    for options in ({}, {"eval_strategy": "steps", "eval_steps": 1, setting: True}):
        set_seed(0)
        model = Dtypes()
        trainer = train(
            tmp_path, model, train_dataset=make_rows(22), eval_dataset=make_rows(5), gradient_accumulation_steps=2,
            **options,
        )  # fmt: skip
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        answers.append((losses, [parameter.tolist() for parameter in model.parameters()]))
        seen.append({entry[1] for entry in model.seen if entry[0]})
    assert answers[0] == answers[1]
    assert seen == [{torch.float32}, {torch.float32}]


def test_full_evaluation_puts_the_model_back_after_an_error(tmp_path: Path) -> None:
    class Fails(Dtypes):
        def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
            raise RuntimeError("broken")

    model = Fails()
    before = snapshot(model)
    trainer = Trainer(model, make_arguments(tmp_path, bf16_full_eval=True))
    with pytest.raises(RuntimeError, match="broken"):
        trainer.evaluate(make_rows(4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_full_evaluation_leaves_labels_exact(tmp_path: Path) -> None:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            values = self.layer(x)[:, 0]
            return {"loss": nn.functional.mse_loss(values, labels), "values": values}

    rows = [{"x": torch.ones(4), "labels": torch.tensor(1.2345678)}] * 3
    output = Trainer(Regression(), make_arguments(tmp_path, bf16_full_eval=True)).predict(rows)
    assert output.label_ids.tolist() == [torch.tensor(1.2345678).item()] * 3


def test_full_evaluation_is_refused_where_an_engine_holds_the_weights(tmp_path: Path) -> None:
    from hftrain.core.types import Owns
    from hftrain.strategies.single import SingleDeviceStrategy

    class Engine(SingleDeviceStrategy):
        """Stands in for a strategy that casts; those need packages or devices that may be absent."""

        owns = Owns.CASTING

    with pytest.raises(ConfigError, match="entirely in half precision"):
        Trainer(Net(), make_arguments(tmp_path, bf16_full_eval=True), strategy=Engine(use_cpu=True))


# -- jit_mode_eval ---------------------------------------------------------------------------------------------------


def test_jit_traces_once_per_evaluation_and_says_how_long_it_took(tmp_path: Path) -> None:
    model, calls = Net(), []

    class Own(Trainer):
        def torch_jit_model_eval(self, model: nn.Module, dataloader: Any, training: bool = False) -> nn.Module:
            traced = super().torch_jit_model_eval(model, dataloader, training)
            calls.append(type(traced))
            return traced

    trainer = Own(model, make_arguments(tmp_path, jit_mode_eval=True), compute_metrics=share)
    plain = Trainer(model, make_arguments(tmp_path), compute_metrics=share)
    rows = make_rows(9)
    metrics = trainer.evaluate(rows)
    assert metrics.pop("eval_jit_compilation_time") > 0
    assert numbers(metrics) == pytest.approx(numbers(plain.evaluate(rows)))
    output = trainer.predict(rows, metric_key_prefix="p")
    assert output.metrics["p_jit_compilation_time"] > 0
    numpy.testing.assert_allclose(output.predictions, plain.predict(rows).predictions, rtol=1e-6)
    assert len(calls) == 2
    assert all(issubclass(kind, torch.jit.ScriptModule) for kind in calls)
    assert trainer.model is model
    assert trainer.model.training


def test_model_that_cannot_be_traced_runs_as_it_is_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Untraceable(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
            if torch.jit.is_tracing():
                raise RuntimeError("cannot be traced")
            return super().forward(x, labels)

    trainer = Trainer(Untraceable(), make_arguments(tmp_path, jit_mode_eval=True))
    with caplog.at_level(logging.WARNING, logger="hftrain"):
        assert "eval_loss" in trainer.evaluate(make_rows(9))
    assert "could not be traced and runs untraced" in caplog.text


def test_trace_method_follows_its_arguments(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path))
    trainer.evaluate(make_rows(1))
    model = trainer.model.eval()
    batch = {"x": torch.ones(2, 4)}
    assert trainer.torch_jit_model_eval(model, [batch], training=True) is model
    assert isinstance(trainer.torch_jit_model_eval(model, [batch]), torch.jit.ScriptModule)
    assert isinstance(trainer.torch_jit_model_eval(model, [(torch.ones(2, 4),)]), torch.jit.ScriptModule)
    assert trainer.torch_jit_model_eval(model, []) is model
    assert "could not be traced" in caplog.text
    model.train()


def test_jit_is_refused_for_a_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Cannot use jit_mode_eval=True with Task"):
        Trainer(Task(), make_arguments(tmp_path, jit_mode_eval=True))


# -- eval_use_gather_object ------------------------------------------------------------------------------------------


class Detector(nn.Module):
    """Return objects: one per sample, one of them text."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        boxes = [{"boxes": torch.ones(int(row[0]), 4), "name": f"n{int(row[0])}"} for row in x]
        return {"scores": x * self.scale, "found": boxes}


def test_objects_are_kept_on_request_only(tmp_path: Path) -> None:
    rows = [{"x": torch.tensor([float(n)])} for n in range(6)]
    with pytest.raises(TaskError, match=r"They hold a str.*eval_use_gather_object=True"):
        Trainer(Detector(), make_arguments(tmp_path)).predict(rows)
    output = Trainer(Detector(), make_arguments(tmp_path, eval_use_gather_object=True)).predict(rows)
    scores, found = output.predictions
    assert scores[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert [(entry["boxes"].shape, entry["name"]) for entry in found] == [((n, 4), f"n{n}") for n in range(6)]


# -- evaluation inside training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_evaluation_changes_no_bit_of_what_follows(tmp_path: Path, num_workers: int, is_persistent: bool) -> None:
    if is_persistent and not num_workers:
        return
    answers = []
    rows: Rows = make_rows(22)
    for options in ({}, {"eval_strategy": "steps", "eval_steps": 1}):
        set_seed(0)
        trainer = train(
            tmp_path, Net(dropout=0.3), train_dataset=Noisy(rows), eval_dataset=Noisy(make_rows(5)),
            compute_metrics=share, dataloader_num_workers=num_workers, dataloader_persistent_workers=is_persistent,
            max_steps=8, gradient_accumulation_steps=2, **options,
        )  # fmt: skip
        losses = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        answers.append((losses, [parameter.tolist() for parameter in trainer.model.parameters()]))
    assert answers[0] == answers[1]
