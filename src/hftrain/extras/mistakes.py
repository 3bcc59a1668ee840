"""Explain errors of a step, a dataset or a collator: notes with what is known of them and what to do."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from traceback import format_tb, walk_tb
from types import TracebackType
from typing import Any

import torch
from torch import nn

from hftrain.arguments.training import Seq2SeqTrainingArguments
from hftrain.core.elsewhere import names_elsewhere
from hftrain.core.errors import HFTrainError, TaskError, listed, suggest
from hftrain.core.notes import add_note, describe, facts_of, raising_line
from hftrain.core.signatures import plain_signature
from hftrain.core.tree import is_samples
from hftrain.data.datasets import has_length
from hftrain.strategies.checks import explain_unused
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule
from hftrain.trainer.trainer import Trainer


def explain_mistake(
    error: Exception, task: TaskModule, model: nn.Module, *, trainer: type, loss_maker: str | None, collator: str
) -> None:
    """Add notes to an error: what to do, the place and the batch. Raise a `TaskError` for a loss that cannot be used.

    What is known of a step (its batch, its loss) was kept with the error where it passed, see `keep_facts`, so
    successful steps cost nothing, and errors of callbacks, metrics and schedules get no batch.

    Args:
        trainer: The class whose methods may be the user's.
        loss_maker: The name of the function that returned the loss, if it was neither the task nor the model.
        collator: The name of the argument that is the collator.

    Raises:
        TaskError: A step uses a loss, a column or an attribute that it does not have; the error is its cause.
        StrategyError: A parameter got no gradient in DDP.
    """
    if isinstance(error, HFTrainError) and not isinstance(error, TaskError):
        return
    place_in_data = locate_in_data(error, collator)
    if place_in_data is not None:
        add_note(error, place_in_data)
    if getattr(error, "__notes__", None):
        # Already explained, or not raised in a step.
        return
    facts = facts_of(error)
    if not isinstance(error, HFTrainError):
        cause: HFTrainError | None = None
        if "batch" in facts:
            cause = explain_unused(error, model) or _missing_name_error(task, error, facts["batch"])
        if "loss" in facts:
            is_plain = isinstance(task, ModelTask)
            default_maker = f"{type(model).__name__}.forward" if is_plain else f"{type(task).__name__}.training_step"
            cause = cause or _loss_error(facts["loss"], loss_maker or default_maker)
        if cause is not None:
            if place := raising_line(error):
                add_note(cause, f"At {place}")
            raise cause from error
        hint = _explain_call(error, trainer) or hint_for(error, model, facts.get("batch"))
        if hint is not None:
            add_note(error, hint)
    owner = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(owner, nn.Module):
        parts = ", ".join(name for name, _ in owner.named_children())
        add_note(error, f"{type(owner).__name__} has the children {parts or '(none)'}.")
    if "batch" in facts:
        add_note(error, _describe_batch(task, model, error, facts["batch"], collator))
    if not isinstance(error, HFTrainError) and (place := raising_line(error, only_above=True)):
        add_note(error, f"At {place}")


def _explain_call(error: Exception, trainer: type) -> str | None:
    """Return how a method of the user's Trainer is called, if the error is that it cannot be called so."""
    match = re.match(r"(\S+)\(\) (?:missing|takes|got) ", str(error)) if isinstance(error, TypeError) else None
    name = "" if match is None else match[1].rpartition(".")[2]
    base = next(cls for cls in trainer.__mro__ if cls.__module__.startswith("hftrain."))
    if match is None or not hasattr(base, name) or getattr(getattr(trainer, name), "__qualname__", "") != match[1]:
        return None
    return f"The Trainer calls it as {name}{plain_signature(getattr(base, name))}. Give it these parameters."


def _missing_name_error(task: TaskModule, error: Exception, batch: Any) -> TaskError | None:
    """Return an error if a step looked up a column that its batch does not have, or an attribute of Lightning's."""
    kind, name = type(task).__name__, getattr(error, "name", None)
    if getattr(error, "obj", None) is task and (answer := names_elsewhere("module_attributes").get(str(name))):
        return TaskError(f"Cannot use {kind}.{name}:", "a TaskModule does not have it.", answer)
    column = error.args[0] if isinstance(error, KeyError) and error.args else None
    if not isinstance(column, str) or not isinstance(batch, Mapping) or column in batch:
        return None
    return TaskError(
        f"Cannot give {kind} the column {column!r}:",
        f"the batch does not contain it. It contains: {describe(batch)}.",
        "Rename the dataset's column, or add it. If the dataset has it, the collator left it out, as the default one "
        "does with text and None: tokenize texts before training (dataset.map), number labels, or pass a "
        "data_collator that does.",
    )


def _loss_error(loss: Any, maker: str) -> TaskError | None:
    """Return an error if the loss of a step is none that can be differentiated."""
    problem = f"Cannot train with the loss that {maker} returned:"
    if not isinstance(loss, torch.Tensor):
        pair = " It must return (loss, outputs) only if return_outputs=True." if isinstance(loss, tuple) else ""
        return TaskError(problem, f"it is not a tensor ({describe(loss)}).", f"Return a tensor of one number.{pair}")
    if loss.numel() != 1:
        return TaskError(
            problem, f"it has the shape {tuple(loss.shape)}, but a loss must be one number.", "Return its mean."
        )
    if loss.is_complex():
        return TaskError(problem, "it is complex, but a loss must be real.", "Return its abs() or its real part.")
    if loss.requires_grad:
        return None
    if not torch.is_grad_enabled():  # here too, outside of the step
        return TaskError(problem, "no gradients are computed.", "Call train() outside of torch.no_grad().")
    return TaskError(
        problem,
        "it does not depend on any trainable parameter.",
        "Compute it from the model's outputs without detach(), item(), argmax() or torch.no_grad(), and leave some of "
        "the parameters that it depends on with requires_grad=True.",
    )


def _describe_batch(task: TaskModule, model: nn.Module, error: Exception, batch: Any, collator: str) -> str:
    if batch is None:
        return f"The {collator} returned None as a batch. Let it return the batch."
    if is_samples(batch):
        join = "{'x': torch.stack([sample['x'] for sample in samples]), ...}"
        return f"The {collator} returned a list of samples ({describe(batch)}). Let it join them: {join}."
    remedy = ""
    if isinstance(batch, (list, tuple)) and isinstance(error, TypeError):
        names = "Its samples have no names: let the dataset return dicts, such as {'x': ..., 'labels': ...}, or"
        remedy = f" {names} {'write a TaskModule' if isinstance(task, ModelTask) else 'unpack it: x, y = batch'}."
    # The call itself must have failed, not code inside forward.
    elif isinstance(error, TypeError) and str(error).startswith(f"{getattr(model.forward, '__qualname__', '')}() "):
        remedy = (
            f" {type(model).__name__}.forward takes {', '.join(inspect.signature(model.forward).parameters)}. Rename "
            "or leave out the other columns. Let forward take the labels and return the loss first, pass "
            "compute_loss_func, override compute_loss or write a TaskModule."
        )
    return f"The batch: {describe(batch)}.{remedy}"


# -- in a dataset or a collator -------------------------------------------------------------------------------------

# The lines in a traceback with which torch calls a dataset or a collator.
_FETCH_CALLS = re.compile(r'_utils.fetch\.py", line \d+, in \S+\n\s+(.*)')
_WORKER_ERROR = re.compile(r"in DataLoader worker process (\d+)")
_FETCHERS = ("torch.utils.data._utils.fetch", "torch.utils.data.dataset")
_MAX_SAMPLES = 8


def locate_in_data(error: BaseException, collator: str) -> str | None:
    """Describe the sample or batch at which reading the data failed; None if the error was raised elsewhere."""
    if worker := _WORKER_ERROR.search(str(error)):
        # Of a worker's error only the text arrives.
        calls = _FETCH_CALLS.findall(str(error))
        part = f"the {collator}" if calls and "collate_fn(" in calls[-1] else "the dataset"
        more = "Set dataloader_num_workers=0 to debug it in this process, where the sample is named."
        return f"Raised in loader worker {worker[1]} in {part}. {more}"
    calls = _FETCH_CALLS.findall("".join(format_tb(error.__traceback__)))
    if not calls:
        return None
    # Torch's names for what its fetcher holds: the batch's indices, the sample that is read, the samples that were.
    names = _names_of_the_fetch(error.__traceback__)
    indices, reader, samples = names.get("possibly_batched_index"), names.get("self"), names.get("data")
    is_listed = isinstance(indices, (list, tuple)) and any(index is not None for index in indices)
    which = f"samples {listed(indices, most=_MAX_SAMPLES)}" if is_listed else ""  # type: ignore[arg-type]
    if "collate_fn(" not in calls[-1]:
        dataset: Any = getattr(reader, "dataset", None)
        which = f"sample {names['idx']} of " if "idx" in names else f"one of {which} of " if which else ""
        end = f" Its __len__ is {len(dataset)}." if isinstance(error, IndexError) and has_length(dataset) else ""
        return f"Raised while reading {which}{type(dataset).__name__}.{end}"
    failed, end = facts_of(error).get("place"), ""
    if failed is not None and which and samples:
        which, end = f"sample {indices[failed]}", f" It is {describe(samples[failed])}."  # type: ignore[index]
    elif isinstance(samples, (list, tuple)) and samples:
        end = f" The first: {describe(samples[0])}."
    return f"Raised in the {collator} {_name_of(getattr(reader, 'collate_fn', None))}, for {which or 'a batch'}.{end}"


def _names_of_the_fetch(trace: TracebackType | None) -> dict[str, Any]:
    """Return what torch's fetcher held when reading or collating failed: its own frames, none of the user's."""
    # The outermost ones, which belong to the loader's dataset, come last.
    frames = [frame for frame, _ in walk_tb(trace) if frame.f_globals.get("__name__") in _FETCHERS]
    return {name: value for frame in reversed(frames) for name, value in frame.f_locals.items()}


def _name_of(collator: Any) -> str:
    # Skip our wrapper, which removes columns before it calls the user's collator.
    while type(collator).__module__.startswith("hftrain.") and hasattr(collator, "data_collator"):
        collator = collator.data_collator
    return getattr(collator, "__name__", type(collator).__name__)


# -- errors of torch ------------------------------------------------------------------------------------------------

# Patterns of messages, and what these do not say; {got} is a group of the pattern, {ranges} and so on are of `_Facts`.
_HINTS = {
    r"index out of range in self|must match the existing size": "{positions}",
    r"index out of range in self": (
        "An id is not in its table. In the batch, {ranges}. {tables}Resize the model's embeddings to the tokenizer "
        "(model.resize_token_embeddings(len(tokenizer))), or check which ids the collator pads with."
    ),
    r"Target (?:-?\d+) is out of bounds": (
        "In the batch, {ranges}. {outputs}Give the model as many outputs as there are classes, or number the classes "
        "from 0; -100 marks positions without a label."
    ),
    r"expected target dtype|scalar type Long but|floating point type for target|multi-target not supported": (
        "Class labels are whole numbers, one for each sample (or position): labels.long(), labels.squeeze(-1) if they "
        "have a dimension of 1, or labels.argmax(-1) if they are one-hot."
    ),
    r"cast to the desired output type Long|dtype Long but expected": "This loss needs float labels: labels.float().",
    r"Expected more than 1 value per channel": (
        "Batch normalization cannot train on a single sample. If it is the last batch, set dataloader_drop_last=True."
    ),
    r"device-side assert": (
        "Most likely a label or an id is out of range. Train with use_cpu=True to see which; number classes from 0, "
        "and resize the embeddings to the tokenizer."
    ),
    r"not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|on the same device|on the expected device": (
        "The Trainer places the model and the batch: remove .cuda() and .to('cuda'), create other tensors on the "
        "device of the batch, or register them as buffers of the model."
    ),
    r"must be Tensor, not \S*(?:tuple|dict|Output|Encoding)|'(?:tuple|list)' object has no attribute "
    r"'(?:size|shape|dtype|dim|view|mean)'": "Take the tensor out of it: outputs[0], outputs['logits'] or batch['x'].",
    r"backward through the graph a second time": (
        "Return the loss without calling backward(), which the Trainer does; detach() what is kept from one step to "
        "the next, such as a hidden state."
    ),
    r"mat1 and mat2 shapes cannot be multiplied \(\d+x(?P<got>\d+) and (?P<wanted>\d+)x(?P<out>\d+)\)": (
        "{linear}The input has {got} features in its last dimension, which must be {wanted}. Give nn.Linear "
        "in_features={got}, or change the shape of what it gets."
    ),
    r"same dtype, but got|Input type \(|expected scalar type \w+ but|RNN input dtype|mixed dtype \(C": (
        "The model's weights are {weights}, and a column of the batch is not. Convert it in the dataset or the "
        "collator: x.to(torch.{weights}), or x.float() / 255 for images. NumPy arrays are float64 by default."
    ),
    r"DataLoader worker .* (?:is killed|exited)": (
        "If the kernel killed it, memory is the likely cause: use fewer workers (dataloader_num_workers), a smaller "
        "dataloader_prefetch_factor, or smaller samples. dataloader_num_workers=0 shows an error where it happens."
    ),
}


def hint_for(error: Exception, model: nn.Module, batch: Any) -> str | None:
    """Return what to do about an error of a step; None if its message is not one of the known ones."""
    for pattern, hint in _HINTS.items():
        match = re.search(pattern, str(error))
        if match is not None and (text := hint.format_map(_Facts(match, model, batch))):
            return text
    return None


class _Facts(dict[str, str]):
    """What hints mention of the message, the model and the batch; looked up only if they do."""

    def __init__(self, match: re.Match[str], model: nn.Module, batch: Any) -> None:
        super().__init__(match.groupdict())
        self._model, self._batch = model, batch

    def __missing__(self, name: str) -> str:
        return str(getattr(self, f"_{name}")())

    def _ranges(self) -> str:
        columns = dict(self._batch) if isinstance(self._batch, Mapping) else dict(enumerate(self._batch or ()))
        tensors = {name: value for name, value in columns.items() if isinstance(value, torch.Tensor) and value.numel()}
        integers = [(name, tensor) for name, tensor in tensors.items() if not tensor.is_floating_point()]
        return ", ".join(f"{name} go from {int(tensor.min())} to {int(tensor.max())}" for name, tensor in integers)

    def _positions(self) -> str:
        size = getattr(getattr(self._model, "config", None), "max_position_embeddings", None)
        ids = self._batch.get("input_ids") if isinstance(self._batch, Mapping) else None
        if not isinstance(size, int) or not isinstance(ids, torch.Tensor) or ids.shape[-1] <= size:
            return ""
        remedy = f"Truncate the texts: tokenizer(..., truncation=True, max_length={size})."
        return f"The batch has {ids.shape[-1]} positions, and the model {size}. {remedy}"

    def _outputs(self) -> str:
        number = getattr(getattr(self._model, "config", None), "num_labels", None)
        return f"The model has {number} outputs. " if isinstance(number, int) else ""

    def _modules(self, kind: type) -> dict[str, Any]:
        return {name: module for name, module in self._model.named_modules() if isinstance(module, kind)}

    def _tables(self) -> str:
        sizes = {name: table.num_embeddings for name, table in self._modules(nn.Embedding).items()}
        return "".join(f"{name} has {size} rows (ids 0 to {size - 1}). " for name, size in sizes.items())

    def _linear(self) -> str:
        sizes = int(self["wanted"]), int(self["out"])
        layers = self._modules(nn.Linear).items()
        fitting = [name for name, layer in layers if (layer.in_features, layer.out_features) == sizes]
        return f"In {' or '.join(fitting)} = Linear{sizes}: " if fitting else ""

    def _weights(self) -> str:
        kinds = (parameter.dtype for parameter in self._model.parameters() if parameter.is_floating_point())
        return str(next(kinds, torch.float32)).removeprefix("torch.")


# -- unknown names --------------------------------------------------------------------------------------------------


def answer_setting(name: str, known: Iterable[str]) -> str:
    """Return what to do about an unknown name of a setting; `known` are the names that exist."""
    answers = {
        **names_elsewhere("trainer_keywords"),
        **names_elsewhere("arguments"),
        **{keyword: f"Pass {keyword}=... to the Trainer." for keyword in inspect.signature(Trainer).parameters},
        **{other: f"Did you mean {setting!r}?" for other, setting in names_elsewhere("settings").items()},
    }
    answer = _answer(name, known, answers)
    return answer if len(answer) < 500 else "help(TrainingArguments) lists all."


def answer_keyword(name: str, known: Iterable[str]) -> str:
    """Return what to do about an unknown keyword of a Trainer; `known` are those that exist."""
    own = {field: field for field in inspect.signature(Seq2SeqTrainingArguments).parameters}
    settings = {**names_elsewhere("settings"), **own}.items()
    answers = {other: f"Set {setting} in TrainingArguments." for other, setting in settings}
    return _answer(name, known, {**answers, **names_elsewhere("trainer_keywords")})


def _answer(name: str, known: Iterable[str], answers: Mapping[str, str]) -> str:
    """Return the answer to a name elsewhere, or to the one that is nearest, unless a known one is nearer."""
    likeliest = [name] if name in answers else difflib.get_close_matches(name.lower(), {*known, *answers}, n=1)
    return answers[likeliest[0]] if likeliest and likeliest[0] in answers else suggest(name, known)
