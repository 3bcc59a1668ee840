"""`hftrain plan`: which strategy, mesh and micro-batch fit a script's model on GPUs that are not here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hftrain.cli.answer import Answer, table
from hftrain.cli.scripts import at_training
from hftrain.core.errors import ConfigError
from hftrain.core.parameters import meta_twin, weightless
from hftrain.core.tree import map_tensors, tensors_of
from hftrain.storage.files import readable_bytes
from hftrain.strategies.fsdp.units import find_units
from hftrain.strategies.mesh.proposal import USABLE, Candidate, Model, candidates

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}


def show_plan(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    gpus: int = 1,
    memory: str = "80GB",
    gpus_per_machine: int | None = None,
    as_set: bool = False,
) -> Answer:
    """Return the lines that `hftrain plan` prints.

    Raises:
        ConfigError: Nothing fits, a number cannot be read, or the script or its model cannot be planned.
    """
    usable = read_bytes(memory)
    machine = min(8, gpus) if gpus_per_machine is None else gpus_per_machine
    if gpus < 1 or machine < 1:
        raise ConfigError("Cannot plan for these GPUs.", "There is not one.", "Use --gpus 1 or more.", gpus=gpus)
    with weightless():
        model = at_training(script, arguments, read_model)
    fits, rejected = candidates(model, gpus, machine, usable, as_set=as_set)
    rejections = [f"{name}: {reason}" for name, reason in rejected.items()]
    if not fits:
        raise ConfigError(
            f"Cannot train this model on {gpus} GPUs of {memory}.",
            "; ".join(rejections) + ".",
            "Use more GPUs, a lower precision (bf16), LoRA, or shorter sequences.",
        )
    best = fits[0]
    lines = [*table([_HEAD, *map(_row, fits)]), "", *_advice(best, usable)]
    lines += ["", "Rejected:", *rejections] if rejections else []
    data = {"proposal": asdict(best), "fits": [asdict(candidate) for candidate in fits], "rejected": rejected}
    return Answer(lines, data)


def show_estimate(script: str | Path, arguments: Sequence[str] = ()) -> Answer:
    """Return the memory of a step of a script as it is set, on one device and by part; errors as of `show_plan`."""
    with weightless():
        model = at_training(script, arguments, read_model)
    parts = candidates(model, 1, 1, math.inf, as_set=True)[0][0]
    names = ("parameters", "gradients", "optimizer", "activations", "temporary")
    sizes = {**{name: getattr(parts, name) for name in names}, "peak": parts.device}
    return Answer([f"{name:<13}{readable_bytes(size):>10}" for name, size in sizes.items()], sizes)


def read_bytes(text: str) -> float:
    """Return the bytes of a size such as ``80GB``, in powers of 1000."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise ConfigError(f"Cannot read the memory {text!r}.", "It is not a size.", "Write it as in --memory 80GB.")
    return float(match[1]) * _UNITS[match[2].upper()]


def read_model(trainer: Any, *_: Any, **__: Any) -> Model:
    """Return what `proposal` needs to know of a Trainer's model; moves the model to the meta device.

    Raises:
        ConfigError: The model's forward pass, or its optimizer's step, needs numbers.
    """
    model, policy, args = trainer.model, trainer.precision.policy, trainer.args
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.is_meta:
                setattr(module, name, meta_twin(parameter))
    model.to("meta").train()
    if not policy.autocast and policy.param_dtype != torch.float32:
        model.to(policy.param_dtype)
    sizes = {name: parameter.element_size() for name, parameter in model.named_parameters()}
    inputs = next(iter(trainer.get_train_dataloader()))
    if isinstance(inputs, Mapping):
        # A mask that hides nothing is not used; one that hides padding takes little.
        inputs = {name: value for name, value in inputs.items() if name != "attention_mask"}
    inputs = map_tensors(inputs, lambda tensor: tensor.to("meta"))
    classes = (args.gradient_checkpointing_kwargs or {}).get("layer_classes")
    try:
        ratio = _state_ratio(model, trainer.create_optimizer())
        if policy.autocast:
            model.to(policy.compute_dtype)
        planned = Model(
            module=model,
            units=find_units(model, layer_classes=classes, min_num_params=0)[::-1],
            sizes=sizes,
            compute_size=policy.compute_dtype.itemsize,
            reduce_size=policy.reduce_dtype.itemsize,
            state_ratio=ratio,
            casts=policy.autocast,
            forward=lambda: trainer.compute_loss(model, dict(inputs) if isinstance(inputs, dict) else inputs),
            micro_batch=args.per_device_train_batch_size,
            accumulation=args.gradient_accumulation_steps,
            recomputes=args.gradient_checkpointing,
        )
        planned.forward()
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise ConfigError(
            f"Cannot plan for {type(model).__name__}.",
            f"It cannot compute with shapes alone: {error}",
            "Train a few steps with skip_memory_metrics=False and fast_dev_run=3 instead.",
        ) from error
    return planned


def _state_ratio(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Take a step without numbers, and return the bytes of its state for each byte of trainable parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    num_bytes = sum(tensor.nbytes for tensor in tensors_of([*optimizer.state.values()]))
    return num_bytes / max(sum(parameter.nbytes for parameter in trained), 1)


_HEAD = ["strategy", "batch", "recompute", "idle", "weights", "gradients", "optimizer", "activations", "temporary",
         "total", "sent inside", "between"]  # fmt: skip


def _row(plan: Candidate) -> list[str]:
    name = " ".join([plan.strategy, *(f"{name}={value}" for name, value in plan.options.items())])
    sizes = (plan.parameters, plan.gradients, plan.optimizer, plan.activations, plan.temporary, plan.device,
             plan.inside, plan.between)  # fmt: skip
    flags = "yes" if plan.checkpointing else "no", f"{plan.idle / (1 + plan.idle):.0%}"
    return [name, f"{plan.micro_batch} x {plan.accumulation}", *flags, *map(readable_bytes, sizes)]


def _advice(best: Candidate, memory: float) -> list[str]:
    """Return the code to copy for the best candidate, and why it is the best."""
    options = "".join(f", {name}={value!r}" for name, value in best.options.items())
    strategy = f'strategies.create("{best.strategy}"{options})' if options else f'"{best.strategy}"'
    spare = memory * USABLE - best.device
    arguments = f"per_device_train_batch_size={best.micro_batch}, gradient_accumulation_steps={best.accumulation}"
    return [
        "from hftrain import Trainer, TrainingArguments, strategies",
        f"args = TrainingArguments({arguments}, gradient_checkpointing={best.checkpointing})",
        f"trainer = Trainer(model, args, train_dataset=train_dataset, strategy={strategy})",
        f"It fits with {readable_bytes(int(spare))} to spare ({1 - USABLE:.0%} of the memory is left to the runtime), "
        "and of those that fit with as little recomputing, waiting and offloading it communicates least.",
    ]
