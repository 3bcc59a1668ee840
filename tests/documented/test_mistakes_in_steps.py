"""Usual mistakes in the user's own steps, models, losses, optimizers and overrides, and what each is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from support.mistakes import Mistake, check, table
from support.tiny import Net, Task, make_rows, make_trainer, share, train
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from hftrain import StepOutput, TaskError, TaskModule, Trainer, TrainerCallback
from hftrain.rules.error_hints import hint_for
from hftrain.strategies.single import SingleDeviceStrategy


def task(step: Callable[[Any, Any], Any] | None = None, *, base: type = Task, **methods: Any) -> Any:
    """Return a task of a class `Mine` with this training step and these methods."""
    return type("Mine", (base,), {**({"training_step": step} if step else {}), **methods})()


def stepping(name: str, step: Callable[[Any, Any], Any], *says: str, **options: Any) -> Mistake:
    """Make the mistake of training with a step."""
    return Mistake(name, lambda folder: train(folder, task(step), max_steps=2, **options), says, Exception)


def optimizing(name: str, configure: Callable[[Any], Any], *says: str, error: Any = TaskError) -> Mistake:
    """Make the mistake of training with what `configure_optimizers` returns."""
    return Mistake(name, lambda folder: train(folder, task(configure_optimizers=configure), max_steps=1), says, error)


def overriding(name: str, method: str, function: Callable[..., Any], *says: str, verb: str = "train") -> Mistake:
    """Make the mistake of overriding a Trainer's method; `verb` is what is called."""
    function.__qualname__ = f"Mine.{method}"

    def make(folder: Path) -> None:
        kind = type("Mine", (Trainer,), {method: function})
        options: dict[str, Any] = {"eval_strategy": "epoch", "max_steps": 1} if method == "evaluate" else {}
        options |= {"metric_for_best_model": "loss", "greater_is_better": False} if method == "evaluate" else {}
        trainer = make_trainer(folder, Net(), kind=kind, eval_dataset=make_rows(4), **options)
        getattr(trainer, verb)()

    return Mistake(name, make, says, TypeError)


def loss_of(own: Any, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = Task.training_step(own, batch).loss  # type: ignore[assignment]
    return loss


def scores_of(own: Any, batch: Any) -> torch.Tensor:
    scores: torch.Tensor = own.model.layers(batch["x"])
    return scores


def no_grad(own: Any, batch: Any) -> Any:
    with torch.no_grad():
        return loss_of(own, batch)


def backward(own: Any, batch: Any) -> Any:
    loss = loss_of(own, batch)
    loss.backward()
    return loss


def backward_too(own: Any, batch: Any) -> Any:
    loss = loss_of(own, batch)
    loss.backward(retain_graph=True)
    return loss


def zero_first(own: Any, batch: Any) -> Any:
    own.model.zero_grad()
    return loss_of(own, batch)


def parts(own: Any, batch: Any) -> Any:
    """Use gradients in the step without adding to those of the returned loss."""
    loss_of(own, batch).backward()
    own.zero_grad()
    torch.autograd.grad(loss_of(own, batch), list(own.parameters()))
    return loss_of(own, batch)


class OwnBackward(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        loss.backward(retain_graph=True)
        return loss


class OwnPasses(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        for _ in range(2):
            loss = self.compute_loss(model, dict(inputs))
            self.accelerator.backward(loss)
        return loss.detach()


def in_place(own: Any, batch: Any) -> Any:
    hidden = torch.sigmoid(scores_of(own, batch))
    loss = (hidden * hidden).sum()
    hidden.add_(1)
    return loss


def unpack(own: Any, batch: Any) -> Any:
    x, labels = batch
    return F.cross_entropy(own.model.layers(x), labels)


def generator(own: Any, batch: Any) -> Any:
    yield loss_of(own, batch)


def no_super() -> None:
    class Mine(TaskModule):
        def __init__(self) -> None:
            self.model = Net()

    Mine()


def lightnings_dict(own: Any) -> Any:
    optimizer = SGD(own.model.parameters(), lr=1)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)}


def twice(own: Any) -> Any:
    return SGD([{"params": own.model.parameters()}, {"params": own.model.layers[0].parameters()}], lr=1)


def two_optimizers(own: Any) -> Any:
    return tuple(SGD(own.model.layers[place].parameters(), lr=1) for place in (0, 4))


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 3)]


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(4, 3)
        self.layers.requires_grad_(False)


def lazy_init(own: Any) -> None:
    Net.__init__(own)
    own.head = nn.LazyLinear(3)


class Headless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Linear(4, 3)


class Silent(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Forget to return."""


class LossAlone(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        return (F.cross_entropy(self.layers(x), labels),)  # type: ignore[arg-type]


def bert(**batch: Any) -> Callable[[Path], Any]:
    """Train a tiny classifier of transformers' on one kind of sample."""

    def make(folder: Path) -> None:
        models = pytest.importorskip("transformers")
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = models.BertConfig(vocab_size=20, max_position_embeddings=6, **sizes)
        train(folder, models.BertForSequenceClassification(config), max_steps=1, train_dataset=[batch] * 8)

    return make


STEPS = [
    Mistake("no super", lambda _: no_super(), ("Cannot set Mine.model", "super().__init__() in its first"), TaskError),
    stepping("no_grad", no_grad, "Mine.training_step", "does not depend on any trainable parameter", "torch.no_grad()"),
    stepping("detached", lambda s, b: loss_of(s, b).detach(), "does not depend on any trainable", "detach()"),
    stepping(
        "accuracy as loss",
        lambda s, b: (scores_of(s, b).argmax(-1) == b["labels"]).float().mean(),
        "does not depend on any trainable",
        "argmax()",
    ),
    stepping("own backward", backward, "already been freed", "without calling backward()"),
    Mistake(
        "own backward, too",
        lambda folder: make_trainer(folder, task(backward_too), max_steps=1).train(),
        ("2 backward passes, and it had 1 micro-batch", "Mine.training_step", "Return the loss without calling"),
        UserWarning,
    ),
    Mistake(
        "own backward in compute_loss",
        lambda folder: make_trainer(folder, kind=OwnBackward, max_steps=1, gradient_accumulation_steps=2).train(),
        ("4 backward passes, and it had 2 micro-batches", "OwnBackward.compute_loss", "Return the loss"),
        UserWarning,
    ),
    Mistake(
        "zero_grad",
        lambda folder: make_trainer(folder, task(zero_first), max_steps=1, gradient_accumulation_steps=2).train(),
        ("lost the gradients of earlier micro-batches", "Mine.training_step", "Remove zero_grad()"),
        UserWarning,
    ),
    stepping("own optimizer", lambda s, b: s.optimizer.step(), "Cannot use Mine.optimizer", "the Trainer steps the"),
    stepping("self.log", lambda s, b: s.log("a", 1), "Cannot use Mine.log", "StepOutput(loss=loss, logs="),
    stepping("changed in place", in_place, "modified by an inplace operation", "x = x + y"),
    stepping(
        "parameter in place",
        lambda s, b: s.model.layers[0].weight.mul_(0.9),
        "leaf Variable",
        "torch.no_grad()",
    ),
    stepping("item", lambda s, b: loss_of(s, b).item(), "Mine.training_step", "of type float", "without item()"),
    stepping("numpy", lambda s, b: loss_of(s, b).detach().numpy(), "Mine.training_step", "without numpy()"),
    stepping("tuple", lambda s, b: (loss_of(s, b), 3), "Mine.training_step", "StepOutput(loss=..., outputs="),
    stepping("dict", lambda s, b: {"loss": loss_of(s, b)}, "with the keys loss", "StepOutput(loss=..., logs="),
    stepping("None", lambda s, b: None, "it is None", "return loss"),
    stepping("yield", generator, "of type generator", "return, not yield"),
    stepping("no loss in output", lambda s, b: StepOutput(outputs=b["x"]), "holds no loss", "StepOutput(loss=...)"),
    stepping("vector", lambda s, b: scores_of(s, b).mean(1), "has the shape (4,)", "Return its mean"),
    stepping("complex", lambda s, b: scores_of(s, b).mean() * 1j, "it is complex", "Return its abs()"),
    stepping("logs list", lambda s, b: StepOutput(loss=loss_of(s, b), logs=[1]), "Cannot log list of 1 int", "logs={"),  # type: ignore[arg-type]
    stepping("nested logs", lambda s, b: StepOutput(loss=loss_of(s, b), logs={"a": {"b": 1}}), "Cannot log 'a'"),  # type: ignore[dict-item]
    stepping("logs text", lambda s, b: StepOutput(loss=loss_of(s, b), logs={"a": "b"}), "Cannot log 'a'", "it is str"),  # type: ignore[dict-item]
    stepping(
        "column", lambda s, b: b["pixels"], "the column 'pixels'", "It contains: x float32 (4, 4), labels int64 (4,)"
    ),
    stepping(
        "attribute of batch", lambda s, b: b.x.sum(), "'dict' object", "read as batch['x']", "The batch: x float32"
    ),
    stepping(
        "unpacked dict",
        unpack,
        "linear(): argument 'input' (position 1) must be Tensor, not str",
        "write x = batch['x']",
        "Unpacking a dict gives its names",
    ),
    stepping(
        "whole batch",
        lambda s, b: s.model.layers(b),
        "must be Tensor, not dict",
        "model(**batch)",
        "batch['x']",
        "labels int64",
    ),
    stepping(
        "names in a tuple",
        lambda s, b: b["x"],
        "list of (float32 (4, 4), int64 (4,))",
        "have no names",
        "x, y = batch",
        train_dataset=[(torch.zeros(4), 0)] * 4,
    ),
    stepping(
        "text of the dataset",
        lambda s, b: b["text"],
        "the column 'text'",
        "the collator left it out",
        train_dataset=[{"x": torch.zeros(4), "text": "a", "labels": 0}] * 4,
    ),
    stepping(
        "devices", lambda s, b: s.model(b["x"].to("meta"))[0].mean(), "on the expected device", "device of the batch"
    ),
    stepping(
        "one-hot labels",
        lambda s, b: F.cross_entropy(scores_of(s, b), F.one_hot(b["labels"], 5).float()),
        "The labels do not have the shape",
        "labels.argmax(1) for one-hot labels",
    ),
    stepping(
        "labels in a column",
        lambda s, b: F.cross_entropy(scores_of(s, b), b["labels"][:, None]),
        "The labels do not have the shape",
        "labels.flatten() for a column",
    ),
    stepping(
        "float labels",
        lambda s, b: F.cross_entropy(scores_of(s, b), b["labels"].float()),
        "got Float",
        "labels.long()",
    ),
    stepping(
        "label range",
        lambda s, b: F.cross_entropy(scores_of(s, b), b["labels"] + 7),
        "is out of bounds",
        "In the batch, labels go from 0 to",
    ),
    stepping(
        "no probabilities",
        lambda s, b: F.binary_cross_entropy(scores_of(s, b)[:, 0] + 9, b["labels"].float()),
        "binary_cross_entropy_with_logits",
    ),
    stepping(
        "integer targets",
        lambda s, b: F.binary_cross_entropy_with_logits(scores_of(s, b)[:, 0], b["labels"]),
        "The labels are integers",
        "labels.float()",
    ),
    stepping("float ids", lambda s, b: F.embedding(b["x"], torch.ones(5, 4)), "Ids must be integers", "ids.long()"),
    stepping(
        "id range",
        lambda s, b: F.embedding(b["labels"] + 9, torch.ones(5, 4)),
        "An id is not in its table",
        "labels go from 0 to",
    ),
    Mistake(
        "too long",
        bert(input_ids=[1] * 9, labels=0),
        ("has 9 positions, and the model 6", "max_length=6"),
        RuntimeError,
    ),
    Mistake(
        "vocabulary",
        bert(input_ids=[99], labels=0),
        ("ids go from 99 to 99", "word_embeddings has 20 rows", "resize_token_emb"),
        IndexError,
    ),
    Mistake("num_labels", bert(input_ids=[1], labels=3), ("labels go from 3 to 3", "has 2 outputs"), IndexError),
    stepping(
        "float64",
        loss_of,
        "The model's weights are float32",
        "x float64 (4, 4)",
        "NumPy arrays are float64 by default",
        train_dataset=[{"x": numpy.zeros(4), "labels": 0}] * 4,
    ),
    stepping(
        "integers", loss_of, "x int64 (4, 4)", "torch.float32", train_dataset=[{"x": [1, 2, 3, 4], "labels": 0}] * 4
    ),
    stepping(
        "width",
        loss_of,
        "layers.0 = Linear(4, 8)",
        "has 5 features in its last dimension, which must be 4",
        train_dataset=[{"x": torch.zeros(5), "labels": 0}] * 4,
    ),
    stepping(
        "channels last",
        lambda s, b: nn.Conv2d(3, 1, 2)(b["x"]).mean(),
        "[4, 8, 8, 3] to have 3 channels",
        "If they come last, permute",
        train_dataset=[{"x": torch.zeros(8, 8, 3), "labels": 0}] * 4,
    ),
    stepping(
        "bytes",
        lambda s, b: nn.Conv2d(1, 1, 2)(b["x"]).mean(),
        "x uint8 (4, 1, 3, 3)",
        "x.float() / 255",
        train_dataset=[{"x": torch.zeros(1, 3, 3, dtype=torch.uint8), "labels": 0}] * 4,
    ),
    stepping(
        "column of outputs",
        lambda s, b: F.mse_loss(scores_of(s, b)[:, :1], b["labels"].float()),
        "Each output would be compared with every label",
        "outputs.squeeze(-1), or labels[:, None]",
    ),
    stepping(
        "batch normalization of one sample",
        lambda s, b: nn.BatchNorm1d(4)(b["x"]).mean() + loss_of(s, b),
        "needs two or more samples",
        "dataloader_drop_last=True",
        train_dataset=make_rows(5),
    ),
    Mistake(
        "loss made anew",
        lambda folder: make_trainer(
            folder, task(lambda s, b: torch.tensor(loss_of(s, b).item(), requires_grad=True)), max_steps=1
        ).train(),
        ("The first update changed nothing", "torch.tensor(loss.item(), requires_grad=True) does not depend on them"),
        UserWarning,
    ),
    stepping(
        "swapped arguments of a loss",
        lambda s, b: F.cross_entropy(b["labels"], scores_of(s, b)),
        "not implemented for 'Long'",
        "take the model's outputs first",
    ),
    stepping(
        "loss in NumPy",
        lambda s, b: torch.tensor(scores_of(s, b).numpy()).mean(),
        "Gradients do not pass through NumPy",
        "Compute the loss with torch",
    ),
    stepping("forgotten return", lambda s, b: F.relu(None), "Check that each forward ends with return"),  # type: ignore[arg-type]
    stepping("layer of a tuple", lambda s, b: F.relu(s.model(**b)), "tuple", "outputs[0]"),
    Mistake(
        "vector in evaluation",
        lambda folder: make_trainer(
            folder, task(evaluation_step=lambda s, b: scores_of(s, b).mean(1)), eval_dataset=make_rows(4)
        ).evaluate(),
        ("evaluation batch", "has the shape (4,)", "Return its mean"),
        TaskError,
    ),
    Mistake(
        "training mode",
        lambda folder: make_trainer(
            folder, task(evaluation_step=lambda s, b: s.train().training_step(b)), eval_dataset=make_rows(4)
        ).evaluate(),
        ("Net was put into training mode during the evaluation", "Remove .train()"),
        UserWarning,
    ),
    Mistake(
        "no predictions",
        lambda folder: make_trainer(folder, task(lambda s, b: loss_of(s, b))).predict(make_rows(4)),
        ("Cannot predict with Mine", "StepOutput(outputs=...)"),
        TaskError,
    ),
]

MODELS = [
    Mistake(
        "frozen",
        lambda folder: train(folder, Net().requires_grad_(False)),
        ("none of its parameters", "requires_grad_(True)"),
    ),
    Mistake(
        "lazy",
        lambda folder: train(folder, type("Lazy", (Net,), {"__init__": lazy_init})()),
        ("head.weight has no shape yet", "Call the model on one batch before train()"),
    ),
    Mistake("plain list", lambda folder: train(folder, Listed()), ("has no parameters", "nn.ModuleList")),
    Mistake(
        "frozen path",
        lambda folder: train(folder, Frozen(), max_steps=1),
        ("Frozen.forward", "does not depend on any trainable parameter", "requires_grad=True"),
        TaskError,
    ),
    Mistake("no forward", lambda folder: train(folder, Headless()), ("does not define forward",), TypeError),
    Mistake("returns nothing", lambda folder: train(folder, Silent()), ("loss of Silent", "returned None"), TaskError),
    Mistake(
        "no labels",
        lambda folder: train(folder, train_dataset=[{"x": torch.zeros(4)}] * 4),
        ("the batch has no labels", "Add the labels to each sample"),
        TaskError,
    ),
    Mistake(
        "labels are None",
        lambda folder: train(folder, LossAlone(), train_dataset=[{"x": torch.zeros(4)}] * 4),
        ("argument 'target'", "that the batch has the labels", "The batch: x float32 (4, 4)."),
        TypeError,
    ),
    Mistake(
        "no such input",
        lambda folder: train(folder, train_dataset=[{"text": "a", "labels": 0}] * 4),
        ("its columns (text, labels) include none that Net.forward takes (x)", "tokenize"),
        TaskError,
    ),
]


def one_cycle(own: Any) -> Any:
    optimizer = SGD(own.model.parameters(), lr=1)
    return optimizer, OneCycleLR(optimizer, 1.0, total_steps=3)


OPTIMIZERS = [
    Mistake(
        "short schedule",
        lambda folder: train(folder, task(configure_optimizers=one_cycle), max_steps=4),
        ("Cannot train 4 steps with this OneCycleLR", "total_steps=3", "Make it with total_steps=4"),
    ),
    optimizing("Lightning's dict", lightnings_dict, "Mine.configure_optimizers", "interval=None", "Say 'step'"),
    optimizing("lists", lambda s: ([], []), "tuple of (list, list)", "(optimizer, schedule)"),
    optimizing("two", two_optimizers, "tuple of (SGD, SGD)", "several optimizers by name"),
    optimizing("class", lambda s: SGD, "Call it: return SGD(self.model.parameters()"),
    optimizing(
        "schedule alone", lambda s: StepLR(SGD(s.model.parameters(), lr=1), 1), "StepLR", "(optimizer, schedule)"
    ),
    optimizing("function", lambda s: (SGD(s.model.parameters(), lr=1), lambda step: 1.0), "LambdaLR(optimizer"),
    optimizing("other model", lambda s: SGD(Net().parameters(), lr=1), "none of the model's param", error=ValueError),
    optimizing(
        "other schedule",
        lambda s: (SGD(s.model.parameters(), lr=1), StepLR(SGD(Net().parameters(), lr=1), 1)),
        "StepLR",
        "another optimizer than the one that trains",
        error=ValueError,
    ),
    optimizing("twice", twice, "Leave each parameter in one of the groups", error=ValueError),
    optimizing("empty", lambda s: SGD([], lr=1), "empty", "Check how the parameters were filtered", error=ValueError),
    Mistake(
        "takes arguments",
        lambda folder: make_trainer(folder, task(configure_optimizers=lambda s, args: None)),
        ("Mine.configure_optimizers(args)", "with no argument", "configure_optimizers(self)"),
        TaskError,
    ),
    Mistake(
        "part of the model",
        lambda folder: make_trainer(
            folder, task(configure_optimizers=lambda s: SGD(s.model.layers[0].parameters(), lr=1))
        ).train(),
        ("4 parameters that no optimizer holds", "requires_grad_(False)"),
        UserWarning,
    ),
]

OVERRIDES = [
    overriding("loss None", "compute_loss", lambda s, model, inputs, **k: None, "Mine.compute_loss", "(None)"),
    overriding(
        "loss and outputs",
        "compute_loss",
        lambda s, model, inputs, **k: (model(**inputs)[0], None),
        "tuple of",
        "only if return_outputs=True",
    ),
    overriding(
        "loss without outputs",
        "compute_loss",
        lambda s, model, inputs, **k: model(**inputs)[0],
        "compute_loss",
        "return_outputs=True) returned",
        "Return (loss, outputs)",
        verb="evaluate",
    ),
    overriding(
        "old compute_loss",
        "compute_loss",
        lambda s, model, inputs: model(**inputs)[0],
        "Mine.compute_loss",
        "'return_outputs'",
        "return_outputs=False, num_items_in_batch=None",
        verb="evaluate",
    ),
    overriding("step None", "training_step", lambda s, model, inputs, n=None: None, "training_step", "loss.detach()"),
    overriding(
        "two parts",
        "prediction_step",
        lambda s, model, inputs, prediction_loss_only, ignore_keys=None: (None, None),
        "prediction_step",
        "(loss, logits, labels)",
        verb="evaluate",
    ),
    overriding(
        "old prediction_step",
        "prediction_step",
        lambda s, model, inputs: (None, None, None),
        "Mine.prediction_step",
        "prediction_loss_only, ignore_keys=None",
        verb="evaluate",
    ),
    Mistake(
        "setup of a strategy",
        lambda folder: make_trainer(
            folder, strategy=type("Mine", (SingleDeviceStrategy,), {"setup": lambda self, model: model})()
        ),
        ("overrides Strategy.setup", "Define setup(self, model, make_optimizer, policy)"),
        TaskError,
    ),
    Mistake("nothing to predict", lambda folder: make_trainer(folder).predict(), ("no dataset", "predict(test_dat")),
    overriding("log", "log", lambda s: None, "Mine.log", "(self, logs, start_time=None)"),
    overriding("no metrics", "evaluate", lambda s, *a, **k: None, "evaluate() returned a NoneType", "return metrics"),
    overriding("no loader", "get_train_dataloader", lambda s: None, "from None", "return a loader"),
    Mistake(
        "no backward",
        lambda folder: make_trainer(
            folder,
            kind=type("Mine", (Trainer,), {"training_step": lambda s, m, i, n=None: s.compute_loss(m, i).detach()}),
            max_steps=1,
        ).train(),
        ("The first update changed nothing", "super().training_step"),
        UserWarning,
    ),
    Mistake(
        "no optimizer",
        lambda folder: train(folder, kind=type("Mine", (Trainer,), {"create_optimizer": lambda s: None})),
        ("no optimizer has been made", "create_optimizer must set self.optimizer"),
    ),
    Mistake(
        "Trainer without super",
        lambda folder: train(folder, kind=type("Mine", (Trainer,), {"__init__": lambda s, *a, **k: None})),
        ("its __init__ has not called that of Trainer", "super().__init__(...)"),
        AttributeError,
    ),
    Mistake(
        "loss function None",
        lambda folder: train(folder, compute_loss_func=lambda outputs, labels: None),
        ("compute_loss_func returned", "(None)", "Return a tensor"),
        TaskError,
    ),
    Mistake(
        "loss function's arguments",
        lambda folder: train(folder, compute_loss_func=lambda outputs: outputs),
        ("as compute_loss_func", "(outputs, labels, num_items_in_batch=None)"),
        TaskError,
    ),
    Mistake(
        "loss class",
        lambda folder: train(folder, compute_loss_func=nn.CrossEntropyLoss),
        ("the class CrossEntropyLoss", "Pass CrossEntropyLoss()"),
        TaskError,
    ),
    Mistake(
        "loss of a tuple",
        lambda folder: train(folder, compute_loss_func=nn.CrossEntropyLoss()),
        ("must be Tensor, not tuple", "outputs[0], or outputs['logits']"),
        TypeError,
    ),
    Mistake(
        "model_init",
        lambda folder: make_trainer(folder, model_init=Net()),
        ("a Net as model_init", "Pass it as model"),
    ),
    Mistake(
        "preprocess",
        lambda folder: make_trainer(
            folder,
            compute_metrics=share,
            preprocess_logits_for_metrics=lambda logits: logits,
            eval_dataset=make_rows(4),
        ).train(),
        ("as preprocess_logits_for_metrics", "(logits, labels)"),
        TaskError,
    ),
]


@table([*STEPS, *MODELS, *OPTIMIZERS, *OVERRIDES])
def test_mistake_is_told_in_words_that_help(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(mistake, tmp_path, monkeypatch)


def test_error_in_a_step_ends_with_the_line_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        train(tmp_path, task(lambda s, b: nn.Linear(5, 1)(b["x"]).mean()))
    note = caught.value.__notes__[-1]
    assert note.startswith(f"At {__file__}:")
    assert 'nn.Linear(5, 1)(b["x"])' in note


def test_error_within_generated_code_is_left_as_it_is(tmp_path: Path) -> None:
    """As in what torch.compile makes, whose globals have no name."""
    made: dict[str, Any] = {}
    exec("def fail(): raise ValueError('of generated code')", made)
    with pytest.raises(ValueError, match="of generated code"):
        train(tmp_path, task(lambda s, b: made["fail"]()))


def test_error_of_a_part_that_is_not_there_lists_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="no attribute 'net'") as caught:
        train(tmp_path, task(lambda s, b: s.net(b["x"])))
    assert caught.value.__notes__[:2] == [
        "Mine has the children model.",
        "The batch: x float32 (4, 4), labels int64 (4,).",
    ]


@pytest.mark.parametrize(
    ("make", "accumulation"),
    [
        (lambda: (task(parts), Trainer), 1),
        (lambda: (task(zero_first), Trainer), 1),
        (lambda: (task(loss_of), Trainer), 3),
        (lambda: (Net(), OwnPasses), 2),
    ],
)
@pytest.mark.filterwarnings("error::UserWarning")
def test_steps_that_use_gradients_rightly_are_left_alone(tmp_path: Path, make: Any, accumulation: int) -> None:
    model, kind = make()
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_steps": 2}
    train(tmp_path, model, kind=kind, train_dataset=make_rows(20), **options)


def fail(*args: Any, **kwargs: Any) -> Any:
    raise LookupError("of the user's own")


@pytest.mark.parametrize("where", ["callback", "metrics", "schedule"])
def test_error_outside_of_a_step_says_nothing_about_a_batch(tmp_path: Path, where: str) -> None:
    def schedule(own: Any) -> Any:
        optimizer = SGD(own.model.parameters(), lr=1)
        return optimizer, LambdaLR(optimizer, lambda step: fail() if step else 1.0)

    events = {"callback": {"on_step_end": fail}}
    callback = type("Mine", (TrainerCallback,), events.get(where, {"on_log": lambda *args, **kwargs: None}))()
    options: dict[str, Any] = {}
    if where == "metrics":
        options = {"compute_metrics": fail, "eval_dataset": make_rows(4), "eval_strategy": "epoch"}
    own = task(configure_optimizers=schedule) if where == "schedule" else Net()
    with pytest.raises(LookupError) as caught:
        make_trainer(tmp_path, own, callback, max_steps=2, **options).train()
    assert not [note for note in getattr(caught.value, "__notes__", []) if "The batch" in note]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("FSDP expects uniform original parameter dtype but got {...}", "model.float()"),
        ("CUDA error: device-side assert triggered", "use_cpu=True"),
        ("RNN input dtype (torch.float64) does not match weight dtype (torch.float32).", "weights are float32"),
        ("'tuple' object has no attribute 'size'", "outputs[0]"),
    ],
)
def test_message_of_torch_is_explained(text: str, told: str) -> None:
    assert told in str(hint_for(AssertionError(text), nn.Linear(2, 2), {"x": torch.zeros(2, 2)}))


def test_unguarded_script_whose_workers_are_spawned_is_told_the_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nsys.path.insert(0, sys.argv[1])\nfrom pathlib import Path\n"
        "from support.tiny import make_rows, make_trainer\n"
        "make_trainer(Path('run'), max_steps=1, dataloader_num_workers=1, "
        "dataloader_multiprocessing_context='spawn').train()\n"
    )
    tests = str(Path(__file__).parents[1])
    ended = subprocess.run([sys.executable, str(script), tests], capture_output=True, text=True, cwd=tmp_path)
    assert "Put what the script does under `if __name__ == '__main__':`" in ended.stderr
