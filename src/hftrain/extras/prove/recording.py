"""Run one training of a script as a proof wants it, and write down its numbers."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import Subset

from hftrain.arguments.serialization import changed_settings
from hftrain.arguments.training import TrainingArguments
from hftrain.callbacks.base import TrainerCallback
from hftrain.core.tree import as_array, batch_size_of, map_tensors, tensors_of
from hftrain.extras.prove.faults import FAULTS, Untied
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy

STEPS, SAVED_STEP = 5, 3
# How many samples of the evaluation set are used: a prime number, which no number of processes divides.
_EVALUATED = 61
# A model with more parameters is made small.
_SMALL = 20_000_000
# Sizes by the names that configurations give them, and what they become at most.
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "n_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim"), 64),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "n_inner", "hidden_dim"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 128),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
}


@dataclass(frozen=True, kw_only=True)
class Leg:
    """One training of a proof.

    Args:
        name: Of the folder with its numbers.
        strategy: Its name, and options behind commas; None: the script's own.
        precision: ``"own"`` is the script's own.
        batch: Samples of a micro-batch on each data rank; None: the script's own.
        accumulation: Micro-batches of a step; None: the script's own.
        eval_batch: Samples of a batch of the evaluation; None: the script's own.
        resume: The leg whose checkpoint it continues.
        drops: Whether dropout stays on.
        evaluates: Whether it evaluates and predicts at the end.
        is_full: Whether the model keeps its size.
        unit: By how much of their last place the weights are moved first; 0: they are not.
        fault: A fault to plant, see `FAULTS`.
    """

    name: str
    strategy: str | None = "single"
    precision: str = "fp64"
    batch: int | None = None
    accumulation: int | None = None
    eval_batch: int | None = None
    steps: int = STEPS
    resume: str | None = None
    drops: bool = False
    evaluates: bool = False
    is_full: bool = False
    unit: float = 0.0
    fault: str | None = None


class _InDouble(TorchFunctionMode):
    """Compute in float64 what code computes in float32 whatever its inputs are, such as a softmax or a loss."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def swapped(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value is torch.float32 else value

        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(swapped, args), **{name: swapped(value) for name, value in (kwargs or {}).items()})


def prepare(leg: Leg, folder: Path, given: dict[str, Any], notes: list[str]) -> None:
    """Change the arguments of a Trainer's constructor to those of a leg; say in `notes` what else was changed."""
    args = given.get("args") or TrainingArguments(str(folder))
    changes: dict[str, Any] = {
        "output_dir": str(folder), "report_to": "none", "push_to_hub": False, "load_best_model_at_end": False,
        "max_steps": leg.steps, "logging_strategy": "steps", "logging_steps": 1, "logging_nan_inf_filter": False,
        "save_strategy": "steps", "save_steps": SAVED_STEP, "save_total_limit": None, "disable_tqdm": True,
        "eval_on_start": False, "resume_from_checkpoint": None, "auto_find_batch_size": False,
    }  # fmt: skip
    if leg.precision != "own":
        changes |= {"bf16": False, "fp16": False, "tf32": None, "bf16_full_eval": False, "fp16_full_eval": False}
        given["precision"] = leg.precision
    if leg.strategy is not None:
        changes |= {"fsdp": None, "fsdp_config": None, "deepspeed": None}
        given["strategy"] = _strategy(leg.strategy)
    named = {"batch": "per_device_train_batch_size", "accumulation": "gradient_accumulation_steps"}
    named["eval_batch"] = "per_device_eval_batch_size"
    changes |= {name: getattr(leg, field) for field, name in named.items() if getattr(leg, field) is not None}
    kind = type(args)
    known = {name: value for name, value in changes.items() if hasattr(args, name)}
    given["args"] = kind(**{**changed_settings(args.to_dict(), kind), **known})
    given["eval_dataset"] = _fewer(given.get("eval_dataset"), notes)
    model, optimizers = given.get("model"), given.get("optimizers") or (None, None)
    if model is not None and not leg.is_full and optimizers == (None, None):
        model = given["model"] = _small(model, notes)
    if leg.fault == Untied.name and model is not None:
        Untied.plant(model)


def _strategy(text: str) -> str | Strategy:
    """Return the strategy of ``"fsdp_tp,tp_size=4"``; a size that a mesh of several dimensions leaves open is 2."""
    name, *options = text.split(",")
    dims = name.split("_")
    sizes = {f"{dim}_size": 2 for dim in dims if dim in ("tp", "cp", "pp") and len(dims) > 1}
    given = {key: json.loads(value) for key, _, value in (each.partition("=") for each in options)}
    return create_strategy(name, **{**sizes, **given}) if sizes or given else name


def _fewer(data: Any, notes: list[str]) -> Any:
    """Return the first samples of an evaluation set, of each if there are several."""
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        return {name: _fewer(each, notes) for name, each in data.items()}
    if not hasattr(data, "__len__") or len(data) <= _EVALUATED or isinstance(data, (str, list)):
        return data[:_EVALUATED] if isinstance(data, list) else data
    notes.append(f"The first {_EVALUATED} of {len(data)} samples were evaluated.")
    return data.select(range(_EVALUATED)) if hasattr(data, "select") else Subset(data, range(_EVALUATED))


def _small(model: Any, notes: list[str]) -> Any:
    """Return a smaller model of the same class, if it is large and its configuration says how large."""
    number = sum(each.numel() for each in model.parameters())
    config = getattr(model, "config", None)
    if number <= _SMALL or config is None or not hasattr(config, "to_dict"):
        return model
    small = copy.deepcopy(config)
    for name, most in _SIZES.items():
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(getattr(small, name), most))
    if isinstance(getattr(small, "layer_types", None), list):
        small.layer_types = small.layer_types[: small.num_hidden_layers]
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = type(model)(small)
    except Exception as error:
        notes.append(f"The model has its full size, because it cannot be made smaller: {error}")
        return model
    notes.append(f"The model was made small: {sum(each.numel() for each in made.parameters()):,} of {number:,}.")
    return made


def calm(model: nn.Module) -> list[str]:
    """Turn dropout off, in modules and by the attributes that functions read; return the names of what was on."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            found += [f"{name}.p"] if module.p else []
            module.p = 0.0
        for key, value in vars(module).items():
            if ("dropout" in key or "pdrop" in key) and isinstance(value, float) and value:
                setattr(module, key, 0.0)
                found.append(f"{name}.{key}")
    return found


class Recorder(TrainerCallback):
    """Write down the steps of a leg: samples, items, losses, gradients before clipping, norms, weights.

    ``rank0.json`` holds numbers, ``rank0.safetensors`` tensors by ``kind/step/name``. Whole tensors are kept, so all
    processes call it alike.

    Args:
        leg: What it records.
        folder: The folder of the leg.
    """

    def __init__(self, leg: Leg, folder: Path, notes: list[str]) -> None:
        self._leg, self._folder, self._notes = leg, folder, notes
        self._steps: dict[int, dict[str, Any]] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._facts: dict[str, Any] = {}
        self._step = 0

    def wrap_stepper(self, stepper: Any, *, model: Any, **_: Any) -> Any:
        """Keep the gradients that clipping gets."""

        def clip() -> Any:
            self._keep("gradient", {name: each.grad for name, each in self._named() if each.grad is not None})
            return stepper.clip()

        return replace(stepper, clip=clip)

    def wrap_parts(self, parts: Any) -> Any:
        """Note the samples of each micro-batch and its item count, and plant the leg's fault."""
        train = parts.hooks.training_step
        fault = FAULTS.get(self._leg.fault or "")

        def step(model: Any, batch: Any, num_items: Any) -> Any:
            noted = self._steps.setdefault(self._step, {"samples": [], "items": []})
            if self._leg.precision == "fp64":
                batch = map_tensors(batch, lambda each: each.double() if each.is_floating_point() else each)
            noted["samples"].append(_fingerprints(batch))
            noted["items"].append(None if num_items is None else float(num_items))
            self._note_masks(batch)
            if fault is not None:
                batch = fault(batch, len(noted["samples"]), self._accumulation)
                if batch is None:
                    return torch.zeros(())
            with self._computing():
                return train(model, batch, num_items)

        return replace(parts, hooks=replace(parts.hooks, training_step=step))

    def _computing(self) -> AbstractContextManager[Any]:
        return _InDouble() if self._leg.precision == "fp64" else nullcontext()

    def _note_masks(self, batch: Any) -> None:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        if isinstance(mask, torch.Tensor):
            self._facts["has_padding"] = self._facts.get("has_padding", False) or bool((mask == 0).any())

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, each) for name, each in self._model.named_parameters() if each.requires_grad]

    def _keep(self, kind: str, tensors: Mapping[str, Any]) -> None:
        for name, each in tensors.items():
            whole = each.full_tensor() if isinstance(each, DTensor) else each
            if isinstance(whole, torch.Tensor):
                self._tensors[f"{kind}/{self._step}/{name}"] = whole.detach().cpu().contiguous().clone()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the weights that training begins with, and the optimizer's state of a resumed one."""
        self._accumulation = args.gradient_accumulation_steps
        self._model, self._optimizer, self._step = kwargs["model"], kwargs["optimizer"], state.global_step
        self._keep("weights", dict(self._named()))
        self._keep_optimizer()

    def _keep_optimizer(self) -> None:
        if self._leg.strategy == "single" and self._step == SAVED_STEP:
            states = [(name, getattr(self._optimizer, "state", {}).get(each, {})) for name, each in self._named()]
            found = {f"{name}.{key}": value for name, state in states for key, value in state.items()}
            self._keep("optimizer", {name: each for name, each in found.items() if isinstance(each, torch.Tensor)})

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        self._step = state.global_step + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the weights after it, of the last one."""
        self._keep_optimizer()
        if state.global_step == self._leg.steps:
            self._keep("weights", dict(self._named()))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Note what a step logs."""
        if "loss" in logs and state.global_step in self._steps:
            names = ("loss", "grad_norm", "learning_rate")
            self._steps[state.global_step] |= {name: float(logs[name]) for name in names if name in logs}

    def write(self, trainer: Any) -> None:
        """Evaluate and predict if the leg does, and write the files of this process."""
        if self._leg.evaluates and trainer.eval_dataset is not None:
            with self._computing():
                self._evaluate(trainer)
        self._facts |= {
            "leg": vars(self._leg), "steps": self._steps, "notes": self._notes,
            "data_rank": trainer.strategy.data.rank, "data_ranks": trainer.strategy.data.world_size,
            "processes": trainer.strategy.world_size, "batch": trainer.args.per_device_train_batch_size,
            "accumulation": trainer.args.gradient_accumulation_steps,
        }  # fmt: skip
        path = self._folder / f"rank{trainer.strategy.rank}"
        save_file(self._tensors, path.with_suffix(".safetensors"))
        path.with_suffix(".json").write_text(json.dumps(self._facts, indent=1), encoding="utf-8")

    def _evaluate(self, trainer: Any) -> None:
        timing = ("_runtime", "_per_second", "epoch", "_time")
        metrics = trainer.evaluate()
        self._facts["metrics"] = {
            name: float(value) for name, value in metrics.items()
            if isinstance(value, (int, float)) and not any(part in name for part in timing)
        }  # fmt: skip
        data = trainer.eval_dataset
        self._step = self._leg.steps
        for name, each in data.items() if isinstance(data, Mapping) else [("eval", data)]:
            found = trainer.predict(each)
            flat = _flat(name, {"outputs": found.predictions, "labels": found.label_ids})
            labels = flat.get(f"{name}.labels")
            for key, value in flat.items():
                if labels is not None and value.shape[: labels.dim()] == labels.shape:
                    value[labels == -100] = 0  # such as padding, which depends on who shares the batch
                self._keep("predictions", {key: value})


def _flat(name: str, tree: Any) -> dict[str, torch.Tensor]:
    """Return the arrays of nested outputs as tensors, by their path."""
    if isinstance(tree, Mapping):
        return {k: v for key, each in tree.items() for k, v in _flat(f"{name}.{key}", each).items()}
    if isinstance(tree, (tuple, list)):
        return _flat(name, dict(enumerate(tree)))
    return {} if tree is None or getattr(tree, "dtype", None) == object else {name: torch.as_tensor(tree).clone()}


def _fingerprints(batch: Any) -> list[str]:
    """Return a number for each sample that depends on its values without padding; one for a batch without samples."""
    size = batch_size_of(batch)
    tensors = [each.detach().cpu() for each in tensors_of(batch)]
    if not size or not all(each.dim() and len(each) == size for each in tensors):
        return [_digest(tensors)]
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    found = []
    for row in range(size):
        own = [each[row] for each in tensors]
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            kept = mask[row].bool().cpu()
            own = [each[kept] if each.shape[:1] == kept.shape else each for each in own]
        found.append(_digest(own))
    return found


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    whole = hashlib.sha256()
    for each in tensors:
        whole.update(as_array(each.contiguous()).tobytes())
    return whole.hexdigest()[:16]
