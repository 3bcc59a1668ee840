"""How the model is made ready for an evaluation: its dtype, its trace, its recurrent memory."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.log import get_logger
from hftrain.core.tree import detach, map_tensors
from hftrain.core.types import Owns
from hftrain.strategies.base import Strategy
from hftrain.task.introspect import forward_parameters
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule

logger = get_logger(__name__)

# What tracing raises where a model cannot be traced.
_TRACE_ERRORS = (RuntimeError, TypeError, ValueError, NameError, IndexError, AttributeError)


def check_evaluating(args: Any, *, strategy: Strategy, task: TaskModule, spill_dir: Any) -> None:
    """Raise where an evaluation cannot run as the arguments ask.

    Raises:
        ConfigError: A setting needs a plain model, a model that takes its memory, or weights that can be cast.
    """
    if (args.bf16_full_eval or args.fp16_full_eval) and strategy.owns & Owns.CASTING:
        raise ConfigError(
            f"strategy={strategy.name!r} was to evaluate entirely in half precision.",
            "Its own engine holds the weights and decides their dtype.",
            "Use bf16=True or fp16=True, and leave the full evaluation out.",
            bf16_full_eval=args.bf16_full_eval,
            fp16_full_eval=args.fp16_full_eval,
        )
    plain_only = {"past_index": args.past_index >= 0, "jit_mode_eval": args.jit_mode_eval}
    if any(plain_only.values()) and not isinstance(task, ModelTask):
        name = next(name for name, is_on in plain_only.items() if is_on)
        raise ConfigError(
            f"{name}={getattr(args, name)!r} was given together with {type(task).__name__}.",
            "A task calls its model in its own way.",
            "Do it in the task, or pass a plain model.",
        )
    parameters = forward_parameters(task.model)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if args.past_index >= 0 and "mems" not in parameters and not takes_any:
        raise ConfigError(
            f"past_index={args.past_index} was asked for.",
            f"{type(task.model).__name__}.forward takes no argument called mems, in which that output comes back.",
            "Add it, or leave past_index out.",
        )
    if args.past_index >= 0 and args.jit_mode_eval:
        raise ConfigError(
            f"past_index={args.past_index} was given together with jit_mode_eval=True.",
            "A trace has the inputs of the first batch, which has no memory yet.",
            "Leave jit_mode_eval out.",
        )
    if spill_dir is not None and not args.eval_do_concat_batches:
        raise ConfigError(
            "spill_dir was given together with eval_do_concat_batches=False.",
            "Only whole arrays are mapped to files, not a list of batches.",
            "Leave one of the two out.",
            spill_dir=spill_dir,
        )


# -- past_index ------------------------------------------------------------------------------------------------------


def with_memory(inputs: Any, past: Any) -> Any:
    """Return a batch with the last step's memory under ``"mems"``.

    Raises:
        TaskError: The batch has no names.
    """
    if not isinstance(inputs, Mapping):
        raise TaskError(
            "past_index was given.",
            f"The batch is a {type(inputs).__name__}, to which no 'mems' can be added.",
            "Let the collator return a dict.",
        )
    return {**inputs, "mems": past}


def read_memory(outputs: Any, index: int, *, has_loss: bool) -> Any:
    """Return output number `index`, counted as if the loss came first; cut from its graph.

    Args:
        outputs: What the model returned.
        index: The documented `past_index`.
        has_loss: Whether a tuple begins with the loss; a mapping tells itself.

    Raises:
        TaskError: There is no such output.
    """
    values = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    if not ("loss" in outputs if isinstance(outputs, Mapping) else has_loss):
        index -= 1
    if not isinstance(values, (list, tuple)) or not 0 <= index < len(values):
        count = len(values) if isinstance(values, (list, tuple)) else 1
        raise TaskError(
            "past_index was given.",
            f"The model returned {count} outputs, and none at place {index}.",
            "Let it be the place of the memory among the outputs, the loss counted as 0.",
        )
    return detach(values[index])


# -- bf16_full_eval, fp16_full_eval ----------------------------------------------------------------------------------


@contextmanager
def cast_weights(model: nn.Module, dtype: torch.dtype | None, *, keep_on: torch.device | None = None) -> Iterator[None]:
    """Let a model run on copies of its floating-point weights in another dtype, then on the weights themselves again.

    Copies take the places of parameters and buffers in the modules. The tensors themselves are not touched: to change
    their dtype would detach what hangs on their gradients, such as DDP's exchange, without a word.

    Args:
        model: Mutated while the context is open.
        dtype: None changes nothing.
        keep_on: Where the exact weights wait; None leaves them where they are.
    """
    places: list[tuple[nn.Module, str, torch.Tensor]] = []
    copies: dict[int, torch.Tensor] = {}
    devices: list[tuple[torch.Tensor, torch.device]] = []
    for module in model.modules() if dtype is not None else ():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and tensor.is_floating_point() and tensor.dtype is not dtype:
                places.append((module, name, tensor))
    try:
        for module, name, tensor in places:
            # Several places may share one tensor.
            if id(tensor) not in copies:
                copy = tensor.detach().to(dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                copies[id(tensor)] = nn.Parameter(copy, tensor.requires_grad) if is_parameter else copy
                if keep_on is not None and tensor.device != keep_on:
                    devices.append((tensor, tensor.device))
                    tensor.data = tensor.data.to(keep_on)
            setattr(module, name, copies[id(tensor)])
        copies.clear()
        yield
    finally:
        for tensor, device in devices:
            tensor.data = tensor.data.to(device)
        for module, name, tensor in places:
            setattr(module, name, tensor)


def cast_inputs(inputs: Any, dtype: torch.dtype, *, labels: list[str]) -> Any:
    """Return a batch with its floating-point tensors in `dtype`; labels keep theirs."""

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    if isinstance(inputs, Mapping):
        changed = {key: value if key in labels else map_tensors(value, cast) for key, value in inputs.items()}
        return {**inputs, **changed}
    return map_tensors(inputs, cast)


# -- jit_mode_eval ---------------------------------------------------------------------------------------------------


def trace_model(
    model: nn.Module,
    dataloader: Any,
    *,
    prepare: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
) -> nn.Module:
    """Return the model traced with a loader's first batch, or as it is, with a warning, where that fails."""
    try:
        batch = prepare(next(iter(dataloader)))
        with warnings.catch_warnings(), torch.no_grad(), context():
            # torch advises against torch.jit as a whole, which was asked for by name; and says that Python values
            # are recorded as constants, which is what tracing is.
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
            if isinstance(batch, Mapping):
                traced = torch.jit.trace(model, example_kwarg_inputs=dict(batch), strict=False)  # type: ignore[no-untyped-call]
            else:
                example = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
                traced = torch.jit.trace(model, example, strict=False)  # type: ignore[no-untyped-call]
            frozen: nn.Module = torch.jit.freeze(traced)
            return frozen
    except (StopIteration, *_TRACE_ERRORS) as error:
        logger.warning("jit_mode_eval: the model could not be traced and runs as it is: %r", error)
        return model


class JitModel:
    """Trace a model with the first batch that comes, and note how long that took.

    Args:
        trace: The documented `torch_jit_model_eval`.
        model: The model to evaluate.

    Units:
        compilation_s: seconds, once a batch has come.
    """

    def __init__(self, trace: Callable[[nn.Module, Any], nn.Module], model: nn.Module) -> None:
        self.compilation_s: float | None = None
        self._trace = trace
        self._model = model

    def for_batch(self, batch: Any) -> nn.Module:
        """Return the model to call on a batch."""
        if self.compilation_s is None:
            start_s = time.perf_counter()
            self._model = self._trace(self._model, [batch])
            self.compilation_s = round(time.perf_counter() - start_s, 4)
        return self._model
