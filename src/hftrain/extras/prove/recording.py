"""Run one training of a script as a proof wants it, and write down its numbers."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import Subset

from hftrain.arguments.processes import changed_settings
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.base import TrainerCallback
from hftrain.core.seed import preserved_rng, set_seed
from hftrain.core.tree import as_array, batch_size_of, map_tensors, tensors_of
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy

STEPS, SAVED_STEP = 5, 3
# How many samples of the evaluation set are used: a prime number, which no number of processes divides.
_EVALUATED = 61
# A model with more parameters is made small: what the sizes in its configuration become at most, by their names.
_SMALL = 20_000_000
_SIZES = {
    r"head_dim|d_kv": 16,
    r"(num|n)_.*heads?": 4,
    r".*_layers?|n_layers?|depth": 2,
    r"intermediate_size|.*ffn_dim|d_ff|n_inner": 128,
    r"hidden_size|d_model|n_embd|dim": 64,
}
_ARGUMENTS = {
    "batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "eval_batch": "per_device_eval_batch_size",
}


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One training of a proof; None is the script's own setting."""

    name: str  # of the folder with its numbers
    strategy: str | None = "single"  # with options behind commas
    precision: str = "fp64"  # "own": the script's own
    batch: int | None = None
    accumulation: int | None = None
    eval_batch: int | None = None
    steps: int = STEPS
    resume: str | None = None  # the leg whose checkpoint it continues
    drops: bool = False  # whether dropout stays on
    evaluates: bool = False
    is_full: bool = False  # whether the model keeps its size
    unit: float = 0.0  # by how much of their last place the weights are moved first
    fault: str | None = None  # what is planted


def _leave_out(batch: Any, number: int, last: int) -> Any:
    return None if number == last and last > 1 else batch


def _shift_labels(batch: Any, number: int, last: int) -> Any:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    return batch if labels is None else {**batch, "labels": labels.roll(1, -1)}


def _share_mask(batch: Any, number: int, last: int) -> Any:
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return batch if mask is None else {**batch, "attention_mask": mask[:1].expand_as(mask).contiguous()}


def _repeat_sample(batch: Any, number: int, last: int) -> Any:
    size = batch_size_of(batch) or 0
    first = [0, *range(size - 1)]
    return map_tensors(batch, lambda each: each[first] if each.dim() and len(each) == size else each)


def untie(model: Any) -> None:
    """Give the second name of the first shared parameter a copy of its own."""
    seen = set()
    for name, each in model.named_parameters(remove_duplicate=False):
        if each in seen:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(each.detach().clone()))
            if hasattr(model, "config"):
                model.config.tie_word_embeddings = False
            return
        seen.add(each)


def _change_first_label(batch: Any, number: int, last: int) -> Any:
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if labels is None or labels.dim() != 2:
        return batch
    first = torch.where(labels[:, :1] == -100, batch["input_ids"][:, :1], -100)
    return {**batch, "labels": torch.cat([first, labels[:, 1:]], 1)}


UNTIED = "tied weights that are untied"
# A model that shifts its labels does not read the first of them.
FIRST_LABEL = "first label"
# What is planted to see whether a proof notices it, by its name: (micro-batch, its number in the step from 1, how many
# there are) -> the faulty one; None leaves it out.
FAULTS: dict[str, Callable[[Any, int, int], Any]] = {
    "a process left out of the mean": _leave_out,
    "labels shifted once more": _shift_labels,
    "the mask of one sample for all": _share_mask,
    "a sample read twice": _repeat_sample,
    UNTIED: lambda batch, number, last: batch,
    FIRST_LABEL: _change_first_label,
}


def prepare(leg: Leg, folder: Path, given: dict[str, Any], notes: list[str]) -> None:
    """Change the arguments of a Trainer's constructor to those of a leg; say in `notes` what the proof leaves out."""
    args = given.get("args") or TrainingArguments(str(folder))
    changes: dict[str, Any] = {
        "output_dir": str(folder), "report_to": "none", "push_to_hub": False, "load_best_model_at_end": False,
        "max_steps": leg.steps, "logging_strategy": "steps", "logging_steps": 1, "logging_nan_inf_filter": False,
        "save_strategy": "steps", "save_steps": SAVED_STEP, "save_total_limit": None, "disable_tqdm": True,
        "eval_on_start": False, "resume_from_checkpoint": None, "auto_find_batch_size": False,
    }  # fmt: skip
    changes |= {_ARGUMENTS[field]: value for field, value in asdict(leg).items() if field in _ARGUMENTS and value}
    is_ours = isinstance(args, TrainingArguments)
    if leg.precision != "own":
        changes |= dict.fromkeys(("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"), False) | {"tf32": None}
        given |= {"precision": leg.precision} if is_ours else {}
    if leg.strategy is not None:
        changes |= dict.fromkeys(("fsdp", "fsdp_config", "deepspeed"))
        given |= {"strategy": _strategy(leg.strategy)} if is_ours else {}
    kind = type(args)
    given["args"] = kind(**{**changed_settings(args.to_dict(), kind), **changes})
    if not args.dataloader_drop_last:  # which may leave no batch of fewer
        given["eval_dataset"] = _fewer(given.get("eval_dataset"), notes)
    model = given.get("model")
    if model is not None and not leg.is_full and (given.get("optimizers") or (None, None)) == (None, None):
        given["model"] = _small(model, notes)
    if model is not None and leg.fault == UNTIED:
        untie(given["model"])


def _strategy(text: str) -> str | Strategy:
    """Return the strategy of ``"fsdp_tp,tp_size=4"``; a size that a mesh of several dimensions leaves open is 2."""
    name, *options = text.split(",")
    dims = name.split("_")
    sizes = {f"{dim}_size": 2 for dim in dims if dim in ("tp", "cp", "pp") and len(dims) > 1}
    sizes |= {key: json.loads(value) for key, _, value in (each.partition("=") for each in options)}
    return create_strategy(name, **sizes) if sizes else name


def _fewer(data: Any, notes: list[str]) -> Any:
    """Return the first samples of an evaluation set, of each if there are several."""
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return {name: _fewer(each, notes) for name, each in data.items()}
    if not hasattr(data, "__len__") or isinstance(data, str) or len(data) <= _EVALUATED:
        return data
    notes.append(f"Only the first {_EVALUATED} of {len(data)} samples were evaluated.")
    return data.select(range(_EVALUATED)) if hasattr(data, "select") else Subset(data, range(_EVALUATED))


def _small(model: Any, notes: list[str]) -> Any:
    """Return a smaller model of the same class, if it is large and its configuration says how large."""
    number = sum(each.numel() for each in model.parameters())
    config: Any = copy.deepcopy(getattr(model, "config", None))
    if number <= _SMALL or not hasattr(config, "to_dict"):
        return model
    for name, value in config.to_dict().items():
        most = next((most for pattern, most in _SIZES.items() if re.fullmatch(pattern, name)), None)
        if most is not None and type(value) is int:
            setattr(config, name, min(value, most))
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = type(model)(config)
    except Exception as error:
        notes.append(f"The model has its full size, because it cannot be made smaller: {error}")
        return model
    notes.append(f"The model was made small: {sum(each.numel() for each in made.parameters()):,} of {number:,}.")
    return made


def calm(model: nn.Module) -> list[str]:
    """Turn dropout off, in modules and by the attributes that functions read; return the names of what was on."""
    found = []
    for name, module in model.named_modules():
        for key, value in list(vars(module).items()):
            is_rate = "drop" in key or (key == "p" and "Dropout" in type(module).__name__)
            if is_rate and isinstance(value, float) and value:
                setattr(module, key, 0.0)
                found.append(f"{name}.{key}")
    return found


class _InDouble(TorchFunctionMode):
    """Compute in float64 what code computes in float32 whatever its inputs are, such as a softmax or a loss."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def swapped(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(swapped, args), **{name: swapped(value) for name, value in (kwargs or {}).items()})


class Recorder(TrainerCallback):
    """Write down the steps of a leg: samples, losses, gradients before clipping, norms, weights.

    ``rank0.safetensors`` holds what is compared, by ``kind/step/name``; ``rank0.json`` what else is known. Sharded
    tensors are kept whole, so all processes call it alike. `notes` say what the proof leaves out.
    """

    def __init__(self, leg: Leg, folder: Path, notes: list[str]) -> None:
        self._leg, self._folder, self._step = leg, folder, 0
        self._numbers: dict[str, torch.Tensor] = {}
        self._samples: dict[int, list[str]] = {}
        self._facts: dict[str, Any] = {"notes": notes, "has_padding": False, "draws": False, "shifted": False}

    def wrap_stepper(self, stepper: Any, **_: Any) -> Any:
        """Keep the gradients that clipping gets."""

        def clip() -> Any:
            self._keep("gradient", {name: each.grad for name, each in self._named() if each.grad is not None})
            return stepper.clip()

        return replace(stepper, clip=clip)

    def wrap_parts(self, parts: Any) -> Any:
        """Note the samples of each micro-batch and its item count, and plant the leg's fault."""
        return replace(parts, hooks=replace(parts.hooks, training_step=self.noting(parts.hooks.training_step)))

    def noting(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Return a `training_step` that does so."""
        number = 0

        def step(model: Any, batch: Any, num_items: Any = None) -> Any:
            nonlocal number
            number = 1 if self._step not in self._samples else number + 1
            if self._leg.precision == "fp64":
                batch = map_tensors(batch, lambda each: each.double() if each.is_floating_point() else each)
            self._samples.setdefault(self._step, []).extend(_fingerprints(batch))
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            self._facts["has_padding"] |= isinstance(mask, torch.Tensor) and bool((mask == 0).any())
            self._facts["shifted"] |= _is_shifted(batch)
            batch = FAULTS[self._leg.fault or UNTIED](batch, number, self._accumulation)
            if not self._leg.drops:  # the same micro-batch draws the same numbers in every training
                set_seed(0)
            numbers = str(numpy.random.get_state()), random.getstate(), torch.get_rng_state()
            with self._computing():
                loss = torch.zeros(()) if batch is None else train(model, batch, num_items)
            drawn = numbers[:2] != (str(numpy.random.get_state()), random.getstate())
            self._facts["draws"] |= drawn or not torch.equal(numbers[2], torch.get_rng_state())
            return loss

        return step

    def _computing(self) -> AbstractContextManager[Any]:
        return _InDouble() if self._leg.precision == "fp64" else nullcontext()

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, each) for name, each in self._model.named_parameters() if each.requires_grad]

    def _keep(self, kind: str, values: Mapping[str, Any]) -> None:
        for name, each in values.items():
            whole = each.full_tensor() if isinstance(each, DTensor) else each
            if isinstance(whole, (torch.Tensor, int, float)) and not getattr(
                whole, "is_meta", False
            ):  # of other stages
                kept = torch.as_tensor(whole, dtype=torch.float64, device="cpu")
                self._numbers[f"{kind}/{self._step}/{name}"] = kept.detach().contiguous().clone()

    def _keep_weights(self) -> None:
        self._keep("weights", dict(self._named()))
        if self._leg.strategy == "single":
            states = ((name, getattr(self._optimizer, "state", {}).get(each, {})) for name, each in self._named())
            self._keep("optimizer", {f"{name}.{key}": value for name, state in states for key, value in state.items()})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep what training begins with."""
        self._accumulation = args.gradient_accumulation_steps
        self._model, self._optimizer, self._step = kwargs["model"], kwargs["optimizer"], state.global_step
        self._keep_weights()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        self._step = state.global_step + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the weights where training may end or continue."""
        if state.global_step in (SAVED_STEP, self._leg.steps):
            self._keep_weights()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep what a step logs."""
        names = {"loss": "loss", "grad_norm": "gradient norm", "learning_rate": "learning rate"}
        for name in names.keys() & logs.keys() if "loss" in logs else ():
            self._keep(names[name], {"": logs[name]})

    def write(self, trainer: Any) -> None:
        """Evaluate and predict if the leg does, and write the files of this process."""
        args, strategy = trainer.args, trainer.strategy
        if self._leg.evaluates and trainer.eval_dataset is not None:
            try:
                with self._computing():
                    self._evaluate(trainer)
            except Exception as error:  # such as a task without predictions, or a metric of more samples
                self._facts["notes"].append(f"Evaluation was not proved whole: {type(error).__name__}: {error}")
        self._facts |= {
            "data_rank": strategy.data.rank, "data_ranks": strategy.data.world_size, "processes": strategy.world_size,
            "batch": args.per_device_train_batch_size, "accumulation": args.gradient_accumulation_steps,
            "samples": self._samples,
        }  # fmt: skip
        self._facts["random_data"] = self._leg.evaluates and _is_random(trainer)
        path = self._folder / f"rank{strategy.rank}"
        save_file(self._numbers, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(self._facts, indent=1), encoding="utf-8")

    def _evaluate(self, trainer: Any) -> None:
        measured = trainer.evaluate().items()
        timing = re.compile(r"epoch|.*(_runtime|_per_second|_time)")
        self._keep("metric", {name: value for name, value in measured if not timing.fullmatch(name)})
        data = trainer.eval_dataset
        if getattr(trainer.args, "predict_with_generate", False):  # whose padding depends on who shares the batch
            self._facts["notes"].append("Generated tokens were not compared, only their metrics.")
            return
        for name, each in data.items() if isinstance(data, Mapping) else [("", data)]:
            found = trainer.predict(each)
            outputs = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
            flat = _flat(name, {"outputs": outputs, "labels": found.label_ids})
            labels = flat.get(f"{name}.labels")
            for value in flat.values():
                if labels is not None and value.shape[: labels.dim()] == labels.shape:
                    value[labels == -100] = 0  # such as padding, which depends on who shares the batch
            self._keep("predictions", flat)


def _flat(name: str, tree: Any) -> dict[str, torch.Tensor]:
    """Return the arrays of nested outputs as tensors, by their path."""
    if isinstance(tree, (tuple, list)):
        tree = dict(enumerate(tree))
    if isinstance(tree, Mapping):
        return {path: value for key, each in tree.items() for path, value in _flat(f"{name}.{key}", each).items()}
    is_numeric = getattr(getattr(tree, "dtype", None), "kind", "") in ("b", "i", "u", "f")
    return {name: torch.as_tensor(tree).clone()} if is_numeric else {}


def _is_shifted(batch: Any) -> bool:
    """Return whether the labels of texts are their next tokens, most of them: the last one of a text may be an end."""
    ids, labels = (batch.get(name) if isinstance(batch, Mapping) else None for name in ("input_ids", "labels"))
    if labels is None or ids is None or ids.dim() != 2 or ids.shape != labels.shape:
        return False
    known = labels[:, :-1] != -100
    next_ones, own = ((labels[:, :-1] == each)[known].float().mean() for each in (ids[:, 1:], ids[:, :-1]))
    return bool(known.any()) and bool(next_ones > 0.8 > own)


def _is_random(trainer: Any) -> bool:
    """Return whether the same samples become another batch the second time, as by augmentation or random masks."""
    try:
        loader = trainer.get_train_dataloader()
        with preserved_rng():
            rows = range(min(8, len(loader.dataset)))
            one, two = (_fingerprints(loader.collate_fn([loader.dataset[row] for row in rows])) for _ in range(2))
        return one != two
    except Exception:  # of a stream, or a loader of its own
        return False


def _fingerprints(batch: Any) -> list[str]:
    """Return a number for each sample that depends on its values without padding; one for a batch without samples."""
    size, tensors = batch_size_of(batch), tensors_of(batch)
    if not size or not all(each.dim() and len(each) == size for each in tensors):
        return [_digest(tensors)]
    if isinstance(batch, Mapping) and {"attention_mask", "input_ids", "labels"} <= batch.keys():
        ids, mask, labels = batch["input_ids"], batch["attention_mask"], batch["labels"]
        if ids.shape == mask.shape:
            return [_digest([ids[row][mask[row].bool()], labels[row][labels[row] != -100]]) for row in range(size)]
    return [_digest([each[row] for each in tensors]) for row in range(size)]


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for each in tensors:
        whole.update(as_array(each.detach().cpu().contiguous()).tobytes())
    return whole.hexdigest()[:16]
