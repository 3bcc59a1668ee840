"""Whatever a model's loss is a mean over: gradients do not depend on the split, nor `eval_loss` on the batch size."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kinds import (
    NUM_CLASSES,
    NUM_ROWS,
    Adds,
    Contrasts,
    Divides,
    Marks,
    NeedsCount,
    Ordered,
    PerSample,
    Shifts,
    Sums,
    Words,
    batch_of,
    full_rows,
    make_model,
    make_rows,
)
from support.tiny import Rows, at, make_arguments, train
from torch.nn.functional import cross_entropy

from hftrain import ConfigError, TaskError, Trainer


def whole(kind: type[Words]) -> tuple[float, torch.Tensor]:
    """Return the loss of all samples in one batch, and its gradient."""
    model, batch = make_model(kind), batch_of(make_rows())
    count = {"num_items_in_batch": (batch["labels"] != -100).sum()} if kind is NeedsCount else {}
    loss = model(**batch, **count)["loss"]
    loss.backward()
    return loss.item(), gradient_of(model)


def gradient_of(model: Words) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def gradient(
    folder: Path,
    kind: type[Words],
    *,
    size: int,
    trainer: type[Trainer] = Trainer,
    rows: Rows | None = None,
    **options: Any,
) -> torch.Tensor:
    """Return the gradient of the first step of a run, over all samples."""
    found: list[torch.Tensor] = []
    keep = at("on_pre_optimizer_step", lambda args, state, control, model, **kwargs: found.append(gradient_of(model)))
    arguments = make_arguments(
        folder, per_device_train_batch_size=size, gradient_accumulation_steps=NUM_ROWS // size, max_steps=1,
        max_grad_norm=0.0, learning_rate=0.0,
    )  # fmt: skip
    trainer(make_model(kind), arguments, train_dataset=rows or make_rows(), callbacks=[keep], **options).train()
    return found[0]


def eval_losses(folder: Path, kind: type[Words], rows: Rows | None = None, **options: Any) -> list[float]:
    losses = []
    for size in (2, 3, 8):
        arguments = make_arguments(folder, per_device_eval_batch_size=size)
        trainer = Trainer(make_model(kind), arguments, eval_dataset=rows or make_rows(), **options)
        losses.append(trainer.evaluate()["eval_loss"])
    return losses


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("kind", [Words, PerSample, Shifts, Divides, NeedsCount])
def test_gradient_is_that_of_the_whole_batch(tmp_path: Path, kind: type[Words], size: int) -> None:
    torch.testing.assert_close(gradient(tmp_path, kind, size=size), whole(kind)[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", [Words, PerSample, Shifts, Divides, Adds])
def test_eval_loss_is_that_of_the_whole_set(tmp_path: Path, kind: type[Words]) -> None:
    assert eval_losses(tmp_path, kind) == pytest.approx([whole(kind)[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sum_is_averaged_over_micro_batches_and_reported_per_sample(tmp_path: Path, size: int) -> None:
    loss, expected = whole(Sums)
    found = gradient(tmp_path, Sums, size=size)
    torch.testing.assert_close(found, expected * size / NUM_ROWS)
    assert eval_losses(tmp_path, Sums) == pytest.approx([loss / NUM_ROWS] * 3)


def test_contrastive_loss_is_weighed_by_samples_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows, model = make_rows(), make_model(Contrasts)
    with caplog.at_level(logging.WARNING, "hftrain"):
        found = eval_losses(tmp_path, Contrasts)
    of_3 = [model(**batch_of(rows[start : start + 3]))["loss"].item() for start in (0, 3, 6)]
    assert found[1] == pytest.approx((3 * of_3[0] + 3 * of_3[1] + 2 * of_3[2]) / 8)
    assert caplog.text.count("Cannot prove of the loss of Contrasts what it is a mean over") == 2


def test_user_says_what_the_loss_is_a_mean_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = [eval_losses(tmp_path, Words, count_items=rule) for rule in ("samples", lambda batch: len(batch["x"]))]
    rows, model = make_rows(), make_model(Words)
    parts = [model(**batch_of(rows[start : start + 2]))["loss"].item() for start in range(0, 8, 2)]
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(sum(parts) / 4)
    assert not caplog.records
    with pytest.raises(ConfigError, match="'labels'"):
        eval_losses(tmp_path, Words, count_items="label")


@pytest.mark.parametrize("kind", [Words, PerSample, Divides])
def test_a_model_is_called_as_often_as_by_a_plain_loop(tmp_path: Path, kind: type[Words]) -> None:
    model = make_model(kind)
    arguments = make_arguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, learning_rate=0.0
    )
    hooked: list[Any] = []
    model.layer.register_forward_hook(lambda module, inputs, output: hooked.append(module.training))
    calls = model.calls
    trainer = Trainer(model, arguments, train_dataset=make_rows(), eval_dataset=make_rows())
    trainer.evaluate()
    assert (float(model.seen), model.num_calls) == (2, 2)
    trainer.train()
    expected = [False] * 2 + [True] * 4
    assert (float(model.seen), model.num_calls, calls, hooked) == (6, 6, expected, expected)


class Multiplies(Trainer):
    """Makes other batches than it is given, as trainers that generate completions do."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        return {name: torch.cat([value] * 3) for name, value in prepared.items()}


class FromText(Multiplies):
    """The same, from samples that hold no tensor."""

    def _prepare_inputs(self, inputs: Any) -> Any:
        rows = full_rows()
        return super()._prepare_inputs(batch_of([rows[int(row["name"])] for row in inputs]))


@pytest.mark.parametrize("kind", [Multiplies, FromText])
def test_batches_of_another_size_train_with_the_full_gradient(tmp_path: Path, kind: type[Trainer]) -> None:
    model, found = make_model(Words), []
    keep = at("on_pre_optimizer_step", lambda args, state, control, **kwargs: found.append(gradient_of(model)))
    arguments = make_arguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1, max_grad_norm=0.0,
        learning_rate=0.0, remove_unused_columns=False,
    )  # fmt: skip
    rows: Any = full_rows() if kind is Multiplies else [{"name": str(index)} for index in range(NUM_ROWS)]
    own = {} if kind is Multiplies else {"data_collator": list}
    trainer = kind(model, arguments, train_dataset=rows, callbacks=[keep], **own)
    trainer.train()
    expected = make_model(Words)
    expected(**batch_of(full_rows()))["loss"].backward()
    torch.testing.assert_close(found[0], gradient_of(expected), rtol=1e-6, atol=1e-9)


class ByHand(Trainer):
    """The documented step, written out: it believes that a model which takes the count has divided by it."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss = self.compute_loss(model, self._prepare_inputs(inputs), num_items_in_batch=num_items_in_batch)
        if not self.model_accepts_loss_kwargs or num_items_in_batch is None:
            loss = loss / self.args.gradient_accumulation_steps
        loss.backward()
        return loss.detach()


def test_a_step_written_out_gets_the_loss_that_the_model_has_divided(tmp_path: Path) -> None:
    ours = gradient(tmp_path, NeedsCount, size=2, trainer=ByHand)
    torch.testing.assert_close(ours, whole(NeedsCount)[1], rtol=1e-6, atol=1e-9)
    # The part that is not divided is added up, as in transformers.
    extra = make_model(Adds).layer.weight
    (3 * extra.square().mean()).backward()
    expected = whole(Adds)[1]
    expected[: extra.numel()] += extra.grad.flatten()
    for kind in (ByHand, Trainer):
        torch.testing.assert_close(gradient(tmp_path, Adds, size=2, trainer=kind), expected, rtol=1e-6, atol=1e-9)


def test_a_loss_that_is_nan_is_shown_and_not_called_ambiguous(tmp_path: Path, caplog: Any) -> None:
    model = make_model(Words)
    torch.nn.init.constant_(next(model.parameters()), float("nan"))
    with caplog.at_level(logging.WARNING, "hftrain"):
        found = Trainer(model, make_arguments(tmp_path), eval_dataset=make_rows()).evaluate()["eval_loss"]
    assert found != found
    assert "Cannot prove" not in caplog.text


def test_a_loss_that_needs_its_count_is_evaluated(tmp_path: Path) -> None:
    assert eval_losses(tmp_path, NeedsCount) == pytest.approx([whole(NeedsCount)[0]] * 3, rel=1e-6)

    def divides(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
        return cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum") / num_items_in_batch

    found = eval_losses(tmp_path, Words, compute_loss_func=divides)
    assert found == pytest.approx([whole(Words)[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("answers", ["mixed", "no"])
@pytest.mark.parametrize("is_single", [False, True])
def test_booleans_are_labels_and_all_of_them_count(tmp_path: Path, answers: str, is_single: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    labels = torch.rand(NUM_ROWS, NUM_CLASSES, generator=generator) > (0.6 if answers == "mixed" else 1)
    labels = labels[:, 0] if is_single else labels
    rows = [{"x": row["x"], "labels": each} for row, each in zip(make_rows(), labels, strict=True)]
    expected = make_model(Marks)
    loss = expected(**batch_of(rows))["loss"]
    loss.backward()
    found = gradient(tmp_path, Marks, size=2, rows=rows)
    torch.testing.assert_close(found, gradient_of(expected), rtol=1e-6, atol=1e-9)
    assert eval_losses(tmp_path, Marks, rows=rows) == pytest.approx([loss.item()] * 3, rel=1e-6)


def ambiguous_rows(num_rest: int) -> Rows:
    """Return first two samples of 6 and 5 labels of which equally many are shifted, then others."""
    rows = full_rows()
    rows[1]["labels"][0] = -100
    for index, row in enumerate(rows[2:]):
        row["labels"][num_rest - index % 3 :] = -100
    return rows


def test_kinds_that_one_batch_cannot_tell_apart_are_told_by_later_ones(tmp_path: Path) -> None:
    rows, expected = ambiguous_rows(4), make_model(PerSample)
    loss = expected(**batch_of(rows))["loss"].item()
    trainer = Trainer(make_model(PerSample), make_arguments(tmp_path, per_device_eval_batch_size=2), eval_dataset=rows)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, rel=1e-6)


class Graphs(Words):
    """One number for each graph; a batch's first tensors are its edges, a constant and the nodes of all graphs."""

    def forward(self, edges: Any, weight: Any, x: Any, graph: Any, labels: Any = None, **kwargs: Any) -> Any:
        logits = torch.zeros(len(labels), NUM_CLASSES).double().index_add_(0, graph, self.layer(x)).mean(1)
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def join_graphs(rows: Rows) -> dict[str, torch.Tensor]:
    sizes = torch.tensor([int((row["labels"] != -100).sum()) for row in rows])
    return {
        "edges": torch.zeros(2, 5),
        "weight": torch.ones(3),
        "x": torch.cat([row["x"][:size] for row, size in zip(rows, sizes, strict=True)]),
        "graph": torch.arange(len(rows)).repeat_interleave(sizes),
        "labels": sizes.double(),
    }


@pytest.mark.parametrize("options", [{}, {"count_items": "samples"}])
def test_samples_are_as_many_as_labels(tmp_path: Path, options: dict[str, Any]) -> None:
    expected = make_model(Graphs)
    loss = expected(**join_graphs(make_rows()))["loss"]
    loss.backward()
    options = {**options, "data_collator": join_graphs}
    found = gradient(tmp_path, Graphs, size=2, **options)
    torch.testing.assert_close(found, gradient_of(expected), rtol=1e-6, atol=1e-9)
    assert eval_losses(tmp_path, Graphs, **options) == pytest.approx([loss.item()] * 3, rel=1e-6)


class PerPosition(Trainer):
    """A loss of the user's own: a mean over samples, whatever the labels; or a part of it."""

    divisor = 1

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(inputs["x"])
        loss = outputs["logits"].square().mean() / self.divisor
        return (loss, outputs) if return_outputs else loss


class Forwards(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


CANNOT = "Cannot prove of the loss of"


class Silent(Words):
    """Gets no count, so that transformers averages over micro-batches."""

    accepts_loss_kwargs = False


@pytest.mark.parametrize(
    ("kind", "rows", "options", "num"),
    [
        (PerPosition, make_rows, {}, 1),
        (PerPosition, make_rows, {"count_items": "labels"}, 0),
        (PerPosition, full_rows, {}, 0),
        (Forwards, make_rows, {}, 0),
        (Trainer, make_rows, {"compute_loss_func": lambda outputs, labels: outputs["logits"].square().mean()}, 1),
    ],
)
def test_what_cannot_be_proved_of_the_users_own_loss_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, rows: Any, options: dict[str, Any], num: int
) -> None:
    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 2}
    for method in ("train", "evaluate"):
        caplog.clear()
        arguments = make_arguments(tmp_path, max_steps=2, **sizes)
        trainer = kind(make_model(Silent), arguments, train_dataset=rows(), eval_dataset=rows(), **options)
        getattr(trainer, method)()
        assert caplog.text.count(CANNOT) == num, method


@pytest.mark.parametrize("size", [1, 2])
def test_a_mean_that_no_batch_tells_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int) -> None:
    rows = [{**row, "labels": row["labels"].clamp(min=0)} for row in make_rows()]
    for index, row in enumerate(rows):  # two by two, samples hold equally many labels
        row["labels"][3 + index // 2 % 3 :] = -100

    for kind, options in ((Words, {}), (PerSample, {"count_items": "samples"})):
        expected = make_model(kind)
        loss = expected(**batch_of(rows))["loss"]
        loss.backward()
        caplog.clear()
        found = gradient(tmp_path, kind, size=size, rows=rows, trainer=Ordered, **options)
        torch.testing.assert_close(found, gradient_of(expected), rtol=1e-6, atol=1e-9)
        assert caplog.text.count("which of several equal means it is") == (not options)
        arguments = make_arguments(tmp_path, per_device_eval_batch_size=size)
        trainer = Trainer(make_model(kind), arguments, eval_dataset=rows, **options)
        caplog.clear()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert caplog.text.count("which of several equal means it is") == (not options)


class Draws(Silent):
    def loss(self, logits: torch.Tensor, labels: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return super().loss(logits + torch.rand(()), labels) * (1 + torch.rand(()))


@pytest.mark.parametrize("method", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("kind", "rows", "options", "num"),
    [
        (Draws, make_rows, {}, 1),
        (Draws, full_rows, {}, 0),
        (Draws, make_rows, {"count_items": "labels"}, 0),
        (Words, make_rows, {}, 0),
    ],
)
def test_a_models_loss_that_cannot_be_proved_is_named_if_that_matters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Any, rows: Any, options: Any, num: int, method: str
) -> None:
    sizes = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "per_device_eval_batch_size": 4}
    arguments = make_arguments(tmp_path, num_train_epochs=4, **sizes)
    trainer = Trainer(make_model(kind), arguments, train_dataset=rows(), eval_dataset=rows(), **options)
    getattr(trainer, method)()
    assert caplog.text.count(CANNOT) == num


def test_evaluation_in_a_run_finds_what_its_training_batches_do_not_tell(tmp_path: Path) -> None:
    expected = make_model(PerSample)
    loss = expected(**batch_of(make_rows()))["loss"].item()
    trainer = train(
        tmp_path, make_model(PerSample), train_dataset=full_rows(), eval_dataset=make_rows(),
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1, learning_rate=0.0,
        per_device_eval_batch_size=3, eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert found == pytest.approx([loss], rel=1e-6)


class Logs(Trainer):
    """Reads the count to log it, and returns the model's own mean."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert num_items_in_batch is None or num_items_in_batch.item() > 1
        outputs = model(**inputs)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


@pytest.mark.parametrize("kind", [Words, Divides])
def test_an_override_that_logs_the_count_has_the_gradient_of_the_mean(tmp_path: Path, kind: type[Words]) -> None:
    found = gradient(tmp_path, kind, size=2, trainer=Logs)
    torch.testing.assert_close(found, whole(kind)[1], rtol=1e-6, atol=1e-9)
    arguments = make_arguments(tmp_path, per_device_eval_batch_size=3)
    loss = Logs(make_model(kind), arguments, eval_dataset=make_rows()).evaluate()["eval_loss"]
    assert loss == pytest.approx(whole(kind)[0], rel=1e-6)


def averaged(kind: type[Words], size: int) -> torch.Tensor:
    """Return the gradient of the mean over batches of a size, in the order in which the Trainer draws them."""
    model, rows = make_model(kind), make_rows()
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(42)).tolist()
    for start in range(0, NUM_ROWS, size):
        loss = model(**batch_of([rows[index] for index in order[start : start + size]]))["loss"]
        (loss * size / NUM_ROWS).backward()
    return gradient_of(model)


class Declines(Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class Means(Trainer):
    loss_is_scaled_for_ga = False


class DeclinesInItsClass(Trainer):
    model_accepts_loss_kwargs = False


@pytest.mark.parametrize(
    ("kind", "trainer"),
    [(Words, Declines), (Words, Means), (Divides, Declines), (Divides, DeclinesInItsClass)],
)
def test_a_declared_mean_is_averaged_over_micro_batches_alike(
    tmp_path: Path, kind: type[Words], trainer: type[Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    found = gradient(tmp_path, kind, size=2, trainer=trainer)
    torch.testing.assert_close(found, averaged(kind, 2), rtol=1e-6, atol=1e-9)
    arguments = make_arguments(tmp_path, per_device_eval_batch_size=2)
    loss = trainer(make_model(kind), arguments, eval_dataset=make_rows()).evaluate()["eval_loss"]
    parts = [make_model(kind)(**batch_of(make_rows()[start : start + 2]))["loss"].item() for start in range(0, 8, 2)]
    assert loss == pytest.approx(sum(parts) / 4, rel=1e-6)
    assert not caplog.records


class DividesByHand(PerPosition):
    divisor = 4


@pytest.mark.parametrize(("kind", "factor"), [(PerPosition, 4), (DividesByHand, 1)])
def test_a_loss_of_which_nothing_is_known_is_used_as_transformers_does(
    tmp_path: Path, kind: type[PerPosition], factor: int, caplog: pytest.LogCaptureFixture
) -> None:
    expected = make_model(Words)
    (factor * expected(**batch_of(full_rows()))["logits"].square().mean()).backward()
    found = gradient(tmp_path, Words, size=2, trainer=kind, rows=full_rows())
    torch.testing.assert_close(found, gradient_of(expected), rtol=1e-6, atol=1e-9)
    assert caplog.text.count("As in transformers, it is used as it is") == 1


class Masks(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs["labels"].clone()
        labels[:, 0] = -100
        outputs = model(inputs["x"], labels)
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


def test_a_mean_over_other_labels_than_those_of_the_batch_is_not_weighted_by_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(42)).tolist()
    model, rows = make_model(Silent), make_rows()
    for start in range(0, NUM_ROWS, 2):
        batch = batch_of([rows[index] for index in order[start : start + 2]])
        batch["labels"][:, 0] = -100
        (model(**batch)["loss"] / 4).backward()
    found = gradient(tmp_path, Silent, size=2, trainer=Masks)
    torch.testing.assert_close(found, gradient_of(model), rtol=1e-6, atol=1e-9)
    assert caplog.text.count(CANNOT) == 1


class Unshifted(Shifts):
    """Gets a count of all labels from transformers, as GPT-2 does, but hftrain smooths its labels."""

    loss_type = None


@pytest.mark.parametrize("is_overridden", [False, True])
def test_smoothed_loss_is_the_mean_over_the_labels_that_it_smooths(tmp_path: Path, is_overridden: bool) -> None:
    rows, options = make_rows(), {"label_smoothing_factor": 0.1}
    model = make_model(Unshifted)
    batch = batch_of(rows)
    loss = cross_entropy(
        model(batch["x"])["logits"][:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1
    )
    loss.backward()
    found: list[torch.Tensor] = []
    keep = at("on_pre_optimizer_step", lambda args, state, control, model, **kwargs: found.append(gradient_of(model)))
    kind = Forwards if is_overridden else Trainer
    for size in (2, 4):
        arguments = make_arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=NUM_ROWS // size, max_steps=1,
            max_grad_norm=0.0, learning_rate=0.0, per_device_eval_batch_size=size - 1, **options,
        )  # fmt: skip
        trainer = kind(make_model(Unshifted), arguments, train_dataset=rows, eval_dataset=rows, callbacks=[keep])
        trainer.task.is_causal = True
        trainer.train()
        torch.testing.assert_close(found.pop(), gradient_of(model), rtol=1e-6, atol=1e-9)
        assert trainer.evaluate()["eval_loss"] == pytest.approx(loss.item(), rel=1e-6)


def takes_and_ignores(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    return cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def weighs_classes(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    weight = torch.arange(1, NUM_CLASSES + 1).double()
    return cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), weight=weight)


def test_a_function_that_ignores_its_count_is_weighted_as_the_mean_that_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = gradient(tmp_path, Words, size=2, compute_loss_func=takes_and_ignores)
    torch.testing.assert_close(found, whole(Words)[1], rtol=1e-6, atol=1e-9)
    losses = eval_losses(tmp_path, Words, compute_loss_func=takes_and_ignores)
    assert losses == pytest.approx([whole(Words)[0]] * 3, rel=1e-6)
    assert not caplog.records


def test_a_function_of_an_unknown_mean_is_used_as_it_is_and_the_factor_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, rows = make_model(Words), make_rows()
    for start in range(0, NUM_ROWS, 2):
        batch = batch_of(rows[start : start + 2])
        weighs_classes(model(batch["x"]), batch["labels"]).backward()

    found = gradient(tmp_path, Words, size=2, trainer=Ordered, compute_loss_func=weighs_classes)
    torch.testing.assert_close(found, gradient_of(model), rtol=1e-6, atol=1e-9)
    assert "with 4 micro-batches and 1 process(es) it is 4 times a mean" in caplog.text


@pytest.mark.parametrize("kind", [Words, Divides, Silent])
def test_a_step_without_labels_shows_nan_however_it_is_split(tmp_path: Path, kind: type[Words]) -> None:
    rows = make_rows()
    for row in [*rows[:2], *rows[6:]]:
        row["labels"] = torch.full_like(row["labels"], -100)

    losses = []
    for size in (1, 2):
        arguments = make_arguments(
            tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=2 // size, max_steps=4,
            max_grad_norm=0.0, logging_steps=1, logging_nan_inf_filter=False, learning_rate=0.0,
        )  # fmt: skip
        model = make_model(kind)
        before = [p.detach().clone() for p in model.parameters()]
        trainer = Ordered(model, arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert all(map(torch.equal, before, model.parameters()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6, nan_ok=True)
    is_nan = [loss != loss for loss in losses[0]]
    assert is_nan == [True, False, False, True]


class Graph:
    def __init__(self, rows: Rows) -> None:
        self.batch = batch_of(rows)


class TakesGraph(Words):
    def forward(self, graph: Graph, **kwargs: Any) -> Any:
        return super().forward(**graph.batch)


def num_labels(batch: Any) -> torch.Tensor:
    graph: Any = batch["graph"] if isinstance(batch, dict) else batch
    return (graph.batch["labels"] != -100).sum()


@pytest.mark.parametrize("collate", [Graph, lambda rows: {"graph": Graph(rows)}], ids=["object", "dict"])
@pytest.mark.parametrize("method", ["train", "evaluate"])
def test_a_batch_that_is_one_object_needs_count_items(
    tmp_path: Path, collate: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    def run(**options: Any) -> Any:
        arguments = make_arguments(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, per_device_eval_batch_size=2,
            max_steps=1, remove_unused_columns=False,
        )  # fmt: skip
        options = {**options, "train_dataset": make_rows(), "eval_dataset": make_rows(), "data_collator": collate}
        trainer = Trainer(make_model(TakesGraph), arguments, **options)
        return getattr(trainer, method)()

    with pytest.raises(TaskError, match="count_items"):
        run()
    metrics = run(count_items=num_labels)
    if method == "evaluate":
        assert metrics["eval_loss"] == pytest.approx(whole(Words)[0], rel=1e-6)
    assert not caplog.records


def test_evaluation_uses_what_the_training_has_recognised(tmp_path: Path) -> None:
    trainer = train(
        tmp_path, make_model(PerSample), train_dataset=make_rows(), eval_dataset=make_rows(),
        per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=2, learning_rate=0.0,
        per_device_eval_batch_size=1,
    )  # fmt: skip
    assert trainer.evaluate()["eval_loss"] == pytest.approx(whole(PerSample)[0], rel=1e-6)


def test_loss_within_a_transform_of_torch_func_is_computed(tmp_path: Path) -> None:
    class Maps(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = dict(model.named_parameters())
            each = torch.func.vmap(lambda x: torch.func.functional_call(model, parameters, (x,))["logits"].sum())
            return each(inputs["x"]).mean()

    train(tmp_path, make_model(NoCounter), kind=Maps, train_dataset=make_rows(), gradient_accumulation_steps=2)


class NoCounter(Silent):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return {"logits": self.layer(x)}
