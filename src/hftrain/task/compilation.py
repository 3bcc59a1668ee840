"""torch.compile in place: the model is not wrapped, so its state keeps its names.

A model compiles its own call (`nn.Module.compile`). Distributed wrappers, created before or after, call it as usual:
DDP's reducer and hooks stay outside the graph, and torch splits the graph where DDP's buckets end. Unwrapping, saving
and evaluating need no special case, because there is no second module.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hftrain.core.errors import ConfigError, check_known
from hftrain.core.launcher import is_set, launched
from hftrain.core.log import warn_once
from hftrain.core.tree import batch_size_of
from hftrain.task.model_call import ModelCall

_PREFIX = "ACCELERATE_DYNAMO_"


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileConfig:
    """Options of compilation. Source: the documented `torch_compile_backend` and `torch_compile_mode`.

    Args:
        mode: Optimisation goal of inductor, such as ``"reduce-overhead"``; None for its default.
    """

    backend: str = "inductor"
    mode: str | None = None

    @classmethod
    def of(cls, args: Any) -> CompileConfig | None:
        """Return the config that the training arguments choose, None if compilation is off.

        If the arguments do not set it, `accelerate launch --dynamo_backend` decides.
        """
        if args.torch_compile:
            backend, mode = args.torch_compile_backend or "inductor", args.torch_compile_mode
        else:
            backend, mode = launched("ACCELERATE_DYNAMO_BACKEND").lower(), launched("ACCELERATE_DYNAMO_MODE") or None
            if backend in ("no", ""):
                return None
            for option in ("FULLGRAPH", "DYNAMIC", "REGIONAL_COMPILATION"):
                if is_set(f"ACCELERATE_DYNAMO_USE_{option}"):
                    warn_once(f"dynamo_use_{option.lower()} of accelerate's configuration changes nothing here.")
        if mode not in (None, "default") and backend != "inductor":
            ignored = f"torch_compile_mode={mode!r} is an option of inductor"
            warn_once(f"{ignored}; torch_compile_backend={backend!r} may ignore it.")
        return cls(backend=backend, mode=mode)


class Compiler:
    """Compile models while a call such as train() runs, and restore them afterwards.

    Args:
        config: How to compile; None compiles nothing and does not import torch's compiler.
    """

    @classmethod
    def of(cls, args: Any) -> Compiler:
        """Return the compiler that the training arguments choose."""
        return cls(CompileConfig.of(args))

    def __init__(self, config: CompileConfig | None) -> None:
        self.config = config
        self._compiled_models: list[nn.Module] = []
        self._former_environment: dict[str, str | None] = {}
        if config is not None:
            from torch._dynamo import lookup_backend
            from torch._inductor import list_mode_options

            try:
                lookup_backend(config.backend)
            except RuntimeError as error:
                remedy = f"Known here: {', '.join(torch.compiler.list_backends())}; other packages register more."
                problem = f"Cannot use torch_compile_backend={config.backend!r}."
                raise ConfigError(problem, str(error), remedy) from error
            if config.mode is not None and config.backend == "inductor":
                problem = f"Cannot use torch_compile_mode={config.mode!r}."
                check_known(config.mode, list_mode_options(), problem, "inductor has no such mode.")

    def open(self) -> None:
        """Set the documented environment variables from which accelerate's own objects read what to compile.

        Mutates `os.environ`; `close` restores it.
        """
        if self.config is None or self._former_environment:
            return
        settings = {"BACKEND": self.config.backend, "MODE": self.config.mode}
        for name, value in settings.items():
            self._former_environment[_PREFIX + name] = os.environ.get(_PREFIX + name)
            if value is not None:
                os.environ[_PREFIX + name] = value

    def compile(self, model: nn.Module) -> None:
        """Compile the model's call, once; mutates the model until `close`."""
        if self.config is None or any(model is compiled_model for compiled_model in self._compiled_models):
            return
        call = ModelCall.of(model)
        compiled_call = torch.compile(call.as_written, backend=self.config.backend, mode=self.config.mode)
        call.set(compiled=_with_short_batches(model, compiled_call, call.as_written))
        self._compiled_models.append(model)

    def close(self) -> None:
        """Undo the compilation of every model and restore the environment; safe to call twice."""
        for model in self._compiled_models:
            ModelCall.of(model).set(compiled=None)
        self._compiled_models.clear()
        for name, value in self._former_environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._former_environment.clear()


def _with_short_batches(model: nn.Module, compiled: Callable[..., Any], as_written: Callable[..., Any]) -> Any:
    """Return a call of the compiled model, or of the uncompiled one for a rare smaller batch.

    torch would compile again for the short last batch of an epoch. If smaller batches are frequent, it does, and its
    second graph then serves every size.
    """
    full_sizes: dict[bool, int] = {}
    num_calls, num_short = Counter[bool](), Counter[bool]()

    def call(*args: Any, **kwargs: Any) -> Any:
        # Training and evaluation have separate graphs, and usually different batch sizes.
        mode, size = model.training, batch_size_of((args, kwargs)) or 0
        num_calls[mode] += 1
        if size < full_sizes.setdefault(mode, size):
            num_short[mode] += 1
            if 2 * num_short[mode] < num_calls[mode]:
                return as_written(*args, **kwargs)
        return compiled(*args, **kwargs)

    return call
