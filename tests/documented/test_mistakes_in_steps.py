"""Usual mistakes in the user's own steps, models, losses, optimizers and overrides, and what each is told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
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

from hftrain import ConfigError, StepOutput, TaskError, TaskModule, Trainer, TrainerCallback
from hftrain.extras.mistakes import hint_for
from hftrain.strategies.single import SingleDeviceStrategy


def task(step: Callable[[Any, Any], Any] | None = None, *, base: type = Task, **methods: Any) -> Any:
    """Return a task of a class `Mine` with this training step and these methods."""
    return type("Mine", (base,), {**({"training_step": step} if step else {}), **methods})()


def stepping(name: str, step: Callable[[Any, Any], Any], says: str, **options: Any) -> Mistake:
    """Make the mistake of training with a step."""
    return Mistake(name, lambda folder: train(folder, task(step), max_steps=2, **options), says, Exception)


def training(
    name: str, says: str, error: type[BaseException] = ConfigError, model: Any = None, **parts: Any
) -> Mistake:
    """Make the mistake of training with these parts and settings."""
    return Mistake(name, lambda folder: make_trainer(folder, model, **parts).train(), says, error)


def evaluating(name: str, step: Callable[[Any, Any], Any], says: str, error: type[BaseException]) -> Mistake:
    """Make the mistake of evaluating with a step."""
    options: dict[str, Any] = {"eval_dataset": make_rows(4)}
    return Mistake(
        name, lambda folder: make_trainer(folder, task(evaluation_step=step), **options).evaluate(), says, error
    )


def own_trainer(**methods: Any) -> type[Trainer]:
    return type("Mine", (Trainer,), methods)


def optimizing(name: str, configure: Callable[[Any], Any], says: str, error: Any = TaskError) -> Mistake:
    """Make the mistake of training with what `configure_optimizers` returns."""
    return training(name, says, error, task(configure_optimizers=configure), max_steps=1)


def overriding(name: str, method: str, function: Callable[..., Any], says: str, verb: str = "train") -> Mistake:
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


def set_args(own: Any, *args: Any, **kwargs: Any) -> None:
    """As the trainers do that have a loop of their own."""
    own.args = args


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


def computing(forward: Callable[..., Any]) -> Net:
    return type("Own", (Net,), {"forward": forward})()


def loss_alone(own: Any, x: torch.Tensor, labels: Any = None, reduction: str = "mean") -> Any:
    return (F.cross_entropy(own.layers(x), labels, reduction=reduction),)


def bert(**batch: Any) -> Callable[[Path], Any]:
    """Train a tiny classifier of transformers' on one kind of sample."""

    def make(folder: Path) -> None:
        models = pytest.importorskip("transformers")
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = models.BertConfig(vocab_size=20, max_position_embeddings=6, **sizes)
        train(folder, models.BertForSequenceClassification(config), max_steps=1, train_dataset=[batch] * 8)

    return make


TWO_PARTS: dict[str, Any] = {"max_steps": 1, "gradient_accumulation_steps": 2}
STEPS = [
    Mistake("no super", lambda _: no_super(), "super().__init__() in its first", TaskError),
    stepping("no_grad", no_grad, "torch.no_grad()"),
    stepping("detached", lambda s, b: loss_of(s, b).detach(), "detach()"),
    stepping("accuracy as loss", lambda s, b: (scores_of(s, b).argmax(-1) == b["labels"]).float().mean(), "argmax()"),
    stepping("own backward", backward, "without calling backward()"),
    training("own backward, too", "Return the loss without calling", UserWarning, task(backward_too), max_steps=1),
    training("own backward in compute_loss", "Return the loss", UserWarning, kind=OwnBackward, **TWO_PARTS),
    training("zero_grad", "Remove zero_grad()", UserWarning, task(zero_first), **TWO_PARTS),
    stepping("Lightning's attribute", lambda s, b: loss_of(s, b) * s.current_epoch, "self.epoch"),
    stepping("own optimizer", lambda s, b: s.optimizer.step(), "the Trainer steps the"),
    stepping("self.log", lambda s, b: s.log("a", 1), "StepOutput(loss=loss, logs="),
    stepping("item", lambda s, b: loss_of(s, b).item(), "without item()"),
    stepping("numpy", lambda s, b: loss_of(s, b).detach().numpy(), "without numpy()"),
    stepping("tuple", lambda s, b: (loss_of(s, b), 3), "StepOutput(loss=..., outputs="),
    stepping("dict", lambda s, b: {"loss": loss_of(s, b)}, "StepOutput(loss=..., logs="),
    stepping("None", lambda s, b: None, "return loss"),
    stepping("yield", generator, "return, not yield"),
    stepping("no loss in output", lambda s, b: StepOutput(outputs=b["x"]), "StepOutput(loss=...)"),
    stepping("vector", lambda s, b: scores_of(s, b).mean(1), "Return its mean"),
    stepping("complex", lambda s, b: scores_of(s, b).mean() * 1j, "Return its abs()"),
    stepping("logs list", lambda s, b: StepOutput(loss=loss_of(s, b), logs=[1]), "logs={"),  # type: ignore[arg-type]
    stepping("nested logs", lambda s, b: StepOutput(loss=loss_of(s, b), logs={"a": {"b": 1}}), "Cannot log 'a'"),  # type: ignore[dict-item]
    stepping("logs text", lambda s, b: StepOutput(loss=loss_of(s, b), logs={"a": "b"}), "it is str"),  # type: ignore[dict-item]
    stepping("column", lambda s, b: b["pixels"], "It contains: x float32 (4, 4), labels int64 (4,)"),
    stepping("whole batch", lambda s, b: s.model.layers(b), "labels int64"),
    stepping("names in a tuple", lambda s, b: b["x"], "x, y = batch", train_dataset=[(torch.zeros(4), 0)] * 4),
    stepping(
        "text of the dataset",
        lambda s, b: b["text"],
        "the collator left it out",
        train_dataset=[{"x": torch.zeros(4), "text": "a", "labels": 0}] * 4,
    ),
    stepping("devices", lambda s, b: s.model(b["x"].to("meta"))[0].mean(), "device of the batch"),
    stepping(
        "label range",
        lambda s, b: F.cross_entropy(scores_of(s, b), b["labels"] + 7),
        "In the batch, labels go from 0 to",
    ),
    stepping("float labels", lambda s, b: F.cross_entropy(scores_of(s, b), b["labels"].float()), "labels.long()"),
    stepping("labels in a column", lambda s, b: F.cross_entropy(scores_of(s, b), b["labels"][:, None]), "squeeze(-1)"),
    stepping("one-hot", lambda s, b: F.cross_entropy(scores_of(s, b), F.one_hot(b["labels"], 3)), "argmax(-1)"),
    stepping("one sample", lambda s, b: nn.BatchNorm1d(4)(b["x"][:1]).mean(), "dataloader_drop_last=True"),
    stepping("id range", lambda s, b: F.embedding(b["labels"] + 9, torch.ones(5, 4)), "labels go from 0 to"),
    Mistake("too long", bert(input_ids=[1] * 9, labels=0), "max_length=6", RuntimeError),
    Mistake("vocabulary", bert(input_ids=[99], labels=0), "resize_token_emb", IndexError),
    Mistake("num_labels", bert(input_ids=[1], labels=3), "has 2 outputs", IndexError),
    stepping(
        "float64",
        loss_of,
        "NumPy arrays are float64 by default",
        train_dataset=[{"x": numpy.zeros(4), "labels": 0}] * 4,
    ),
    stepping("integers", loss_of, "torch.float32", train_dataset=[{"x": [1, 2, 3, 4], "labels": 0}] * 4),
    stepping(
        "width",
        loss_of,
        "has 5 features in its last dimension, which must be 4",
        train_dataset=[{"x": torch.zeros(5), "labels": 0}] * 4,
    ),
    stepping(
        "bytes",
        lambda s, b: nn.Conv2d(1, 1, 2)(b["x"]).mean(),
        "x.float() / 255",
        train_dataset=[{"x": torch.zeros(1, 3, 3, dtype=torch.uint8), "labels": 0}] * 4,
    ),
    Mistake(
        "loss made anew",
        lambda folder: make_trainer(
            folder, task(lambda s, b: torch.tensor(loss_of(s, b).item(), requires_grad=True)), max_steps=1
        ).train(),
        "torch.tensor(loss.item(), requires_grad=True) does not depend on them",
        UserWarning,
    ),
    stepping("layer of a tuple", lambda s, b: F.relu(s.model(**b)), "outputs[0]"),
    evaluating("vector in evaluation", lambda s, b: scores_of(s, b).mean(1), "Return its mean", TaskError),
    evaluating("training mode", lambda s, b: s.train().training_step(b), "Remove .train()", UserWarning),
    Mistake(
        "no predictions",
        lambda folder: make_trainer(folder, task(lambda s, b: loss_of(s, b))).predict(make_rows(4)),
        "StepOutput(outputs=...)",
        TaskError,
    ),
]

UNLABELED = [{"x": torch.zeros(4)}] * 4
MODELS = [
    Mistake(
        "lazy",
        lambda folder: train(folder, type("Lazy", (Net,), {"__init__": lazy_init})()),
        "Call the model on one batch before train()",
    ),
    Mistake("plain list", lambda folder: train(folder, Listed()), "nn.ModuleList"),
    Mistake("frozen path", lambda folder: train(folder, Frozen(), max_steps=1), "requires_grad=True", TaskError),
    training("takes no labels", "Own.forward takes x. ", TypeError, computing(lambda own, x: own.layers(x))),
    training("vector of a model", "no scalar loss", TaskError, computing(partialmethod(loss_alone, reduction="none"))),
    training("returns nothing", "returned None", TaskError, computing(lambda own, x, labels=None: None)),
    training("no labels", "Add the labels to each sample", TaskError, train_dataset=UNLABELED),
    training(
        "labels are None", "The batch: x float32 (4, 4).", TypeError, computing(loss_alone), train_dataset=UNLABELED
    ),
    training("no such input", "tokenize", TaskError, train_dataset=[{"text": "a", "labels": 0}] * 4),
]


def one_cycle(own: Any) -> Any:
    optimizer = SGD(own.model.parameters(), lr=1)
    return optimizer, OneCycleLR(optimizer, 1.0, total_steps=3)


OPTIMIZERS = [
    training("short schedule", "with total_steps=4", model=task(configure_optimizers=one_cycle), max_steps=4),
    optimizing("Lightning's dict", lightnings_dict, "Say 'step'"),
    optimizing("lists", lambda s: ([], []), "(optimizer, schedule)"),
    optimizing("two", two_optimizers, "several optimizers by name"),
    optimizing("class", lambda s: SGD, "Call it: return SGD(self.model.parameters()"),
    optimizing("schedule alone", lambda s: StepLR(SGD(s.model.parameters(), lr=1), 1), "(optimizer, schedule)"),
    optimizing("function", lambda s: (SGD(s.model.parameters(), lr=1), lambda step: 1.0), "LambdaLR(optimizer"),
    optimizing(
        "other schedule",
        lambda s: (SGD(s.model.parameters(), lr=1), StepLR(SGD(Net().parameters(), lr=1), 1)),
        "another optimizer than the one that trains",
        error=ValueError,
    ),
    Mistake(
        "takes arguments",
        lambda folder: make_trainer(folder, task(configure_optimizers=lambda s, args: None)),
        "configure_optimizers(self)",
        TaskError,
    ),
    optimizing("part", lambda s: SGD(s.model.layers[0].parameters(), lr=1), "requires_grad_(False)", UserWarning),
]

OVERRIDES = [
    overriding("loss None", "compute_loss", lambda s, model, inputs, **k: None, "(None)"),
    overriding(
        "loss and outputs",
        "compute_loss",
        lambda s, model, inputs, **k: (model(**inputs)[0], None),
        "only if return_outputs=True",
    ),
    overriding(
        "loss without outputs",
        "compute_loss",
        lambda s, model, inputs, **k: model(**inputs)[0],
        "Return (loss, outputs)",
        verb="evaluate",
    ),
    overriding(
        "old compute_loss",
        "compute_loss",
        lambda s, model, inputs: model(**inputs)[0],
        "return_outputs=False, num_items_in_batch=None",
        verb="evaluate",
    ),
    overriding("step None", "training_step", lambda s, model, inputs, n=None: None, "loss.detach()"),
    overriding(
        "two parts",
        "prediction_step",
        lambda s, model, inputs, prediction_loss_only, ignore_keys=None: (None, None),
        "(loss, logits, labels)",
        verb="evaluate",
    ),
    overriding(
        "old prediction_step",
        "prediction_step",
        lambda s, model, inputs: (None, None, None),
        "prediction_loss_only, ignore_keys=None",
        verb="evaluate",
    ),
    Mistake(
        "setup of a strategy",
        lambda folder: make_trainer(
            folder, strategy=type("Mine", (SingleDeviceStrategy,), {"setup": lambda self, model: model})()
        ),
        "Define setup(self, model, make_optimizer, policy)",
        TaskError,
    ),
    Mistake("nothing to predict", lambda folder: make_trainer(folder).predict(), "predict(test_dat"),
    overriding("log", "log", lambda s: None, "(self, logs, start_time=None)"),
    overriding(
        "detached loss",
        "compute_loss",
        lambda s, model, inputs, **k: Trainer.compute_loss(s, model, inputs).detach(),
        "any trainable",
    ),
    overriding("no metrics", "evaluate", lambda s, *a, **k: None, "return metrics"),
    overriding("no loader", "get_train_dataloader", lambda s: None, "return a loader"),
    training("no backward", "super().training_step", UserWarning, max_steps=1,
             kind=own_trainer(training_step=lambda s, m, i, n=None: s.compute_loss(m, i).detach())),
    training("no optimizer", "must set self.optimizer", kind=own_trainer(create_optimizer=lambda s: None)),
    training("no super of a Trainer's", "super().__init__(...)", AttributeError,
             kind=own_trainer(__init__=lambda s, *a, **k: None)),
    training("no super, but args", "super().__init__(...)", AttributeError, kind=own_trainer(__init__=set_args)),
    training("loss None of a function", "Return a tensor", TaskError, compute_loss_func=lambda outputs, labels: None),
    training("loss function's arguments", "(outputs, labels, num_items_in_batch=None)", TaskError,
             compute_loss_func=lambda outputs: outputs),
    training("loss class", "Pass CrossEntropyLoss()", TaskError, compute_loss_func=nn.CrossEntropyLoss),
    training("loss of a tuple", "outputs['logits']", TypeError, compute_loss_func=nn.CrossEntropyLoss()),
    training("preprocess", "(logits, labels)", TaskError, compute_metrics=share, eval_dataset=make_rows(4),
             preprocess_logits_for_metrics=lambda logits: logits),
]  # fmt: skip


@table([*STEPS, *MODELS, *OPTIMIZERS, *OVERRIDES])
def test_mistake_is_told_in_words_that_help(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(mistake, tmp_path, monkeypatch)


def test_error_in_a_step_ends_with_the_line_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        train(tmp_path, task(lambda s, b: nn.Linear(5, 1)(b["x"]).mean()))
    note = caught.value.__notes__[-1]
    assert note.startswith(f"At {__file__}:")
    assert 'nn.Linear(5, 1)(b["x"])' in note


@pytest.mark.parametrize("verb", ["train", "evaluate"])
def test_key_error_of_another_dict_is_left_as_it_is(tmp_path: Path, verb: str) -> None:
    trainer = make_trainer(tmp_path, task(lambda s, b: {}["x"]), eval_dataset=make_rows(4))
    with pytest.raises(KeyError) as caught:
        getattr(trainer, verb)()
    assert [type(caught.value), *caught.value.__notes__] == [
        KeyError,
        "The batch: x float32 (4, 4), labels int64 (4,).",
    ]


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
        ("CUDA error: device-side assert triggered", "use_cpu=True"),
        ("Torch not compiled with CUDA enabled", "remove .cuda()"),
        ("RNN input dtype (torch.float64) does not match weight dtype (torch.float32).", "weights are float32"),
        ("'tuple' object has no attribute 'size'", "outputs[0]"),
    ],
)
def test_message_of_torch_is_explained(text: str, told: str) -> None:
    assert told in str(hint_for(AssertionError(text), nn.Linear(2, 2), {"x": torch.zeros(2, 2)}))
