"""`hftrain plan`: which strategy, mesh and micro-batch fit a script's model on GPUs that are not here."""

from __future__ import annotations

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
from hftrain.core.tree import map_tensors
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
    refused = [f"{name}: {reason}" for name, reason in rejected.items()]
    if not fits:
        raise ConfigError(
            f"Cannot train this model on {gpus} GPUs of {memory}.",
            "; ".join(refused) + ".",
            "Use more GPUs, a lower precision (bf16), LoRA, or shorter sequences.",
        )
    best = fits[0]
    lines = [*table([_HEAD, *map(_row, fits)]), "", *_advice(best, usable)]
    lines += ["", "Rejected:", *refused] if refused else []
    data = {"proposal": asdict(best), "fits": [asdict(each) for each in fits], "rejected": rejected}
    return Answer(lines, data)


def read_bytes(text: str) -> float:
    """Return the bytes of a size such as ``80GB``, in powers of 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if found is None:
        raise ConfigError(f"Cannot read the memory {text!r}.", "It is not a size.", "Write it as in --memory 80GB.")
    return float(found[1]) * _UNITS[found[2].upper()]


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
    try:
        ratio = _state_ratio(model, trainer.create_optimizer())
        if policy.autocast:
            model.to(policy.compute_dtype)
        found = Model(
            module=model,
            units=find_units(model, layer_classes=None, min_num_params=0)[::-1],
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
        found.forward()
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"Cannot plan for {type(model).__name__}.",
            f"It cannot compute with shapes alone: {error}",
            "Train a few steps with skip_memory_metrics=False and fast_dev_run=3 instead.",
        ) from error
    return found


def _state_ratio(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """Take a step without numbers, and return the bytes of its state for each byte of trainable parameters."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(each.nbytes for each in kept) / max(sum(each.nbytes for each in trained), 1)


_HEAD = ["strategy", "batch", "recompute", "idle", "weights", "gradients", "optimizer", "activations", "temporary",
         "total", "sent inside", "between"]  # fmt: skip


def _row(each: Candidate) -> list[str]:
    name = " ".join([each.strategy, *(f"{name}={value}" for name, value in each.options.items())])
    sizes = (each.parameters, each.gradients, each.optimizer, each.activations, each.temporary, each.device,
             each.inside, each.between)  # fmt: skip
    flags = "yes" if each.checkpointing else "no", f"{each.idle / (1 + each.idle):.0%}"
    return [name, f"{each.micro_batch} x {each.accumulation}", *flags, *map(readable_bytes, sizes)]


def _advice(best: Candidate, memory: float) -> list[str]:
    options = "".join(f", {name}={value!r}" for name, value in best.options.items())
    strategy = f'strategies.create("{best.strategy}"{options})' if options else f'"{best.strategy}"'
    left = memory * USABLE - best.device
    arguments = f"per_device_train_batch_size={best.micro_batch}, gradient_accumulation_steps={best.accumulation}"
    return [
        "from hftrain import Trainer, TrainingArguments, strategies",
        f"args = TrainingArguments({arguments}, gradient_checkpointing={best.checkpointing})",
        f"trainer = Trainer(model, args, train_dataset=train_dataset, strategy={strategy})",
        f"It fits with {readable_bytes(int(left))} to spare ({1 - USABLE:.0%} of the memory is left to the runtime), "
        "and of those that fit with as little recomputing, waiting and offloading it communicates least.",
    ]
