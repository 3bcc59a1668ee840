"""The documented helper functions of a Trainer, for scripts that call them directly."""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch

from hftrain.core import speed


def speed_metrics(
    split: str,
    start_time: float,
    num_samples: int | None = None,
    num_steps: int | None = None,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """Return the runtime since `start_time` and the resulting rates.

    Args:
        split: Prefix of the names.
        start_time: A `time.time()` reading.
        num_samples: Samples since then.
        num_steps: Optimizer updates or batches since then.
        num_tokens: Tokens since then.

    Units:
        seconds; counts per second.

    Source: the documented `speed_metrics`.
    """
    start_s = time.perf_counter() - (time.time() - start_time)
    return speed.speed_metrics(split, start_s, num_samples=num_samples, num_steps=num_steps, num_tokens=num_tokens)


def is_main_process(local_rank: int) -> bool:
    """Return whether a local rank is the first of its node. Source: the documented `is_main_process`."""
    return local_rank in (-1, 0)


def total_processes_number(local_rank: int) -> int:
    """Return the number of processes; 1 for a local rank of -1. Source: the documented `total_processes_number`."""
    return 1 if local_rank == -1 else torch.distributed.get_world_size()


def number_of_arguments(func: Callable[..., Any]) -> int:
    """Return the number of arguments a function takes. Source: the documented `number_of_arguments`.

    Example:
        >>> number_of_arguments(functools.partial(lambda a, b: None, 1))
        1
    """
    if isinstance(func, functools.partial):
        return number_of_arguments(func.func) - len(func.args) - len(func.keywords)
    return len(inspect.signature(func).parameters)


def find_executable_batch_size(
    function: Callable[..., Any] | None = None, starting_batch_size: int = 128, auto_find_batch_size: bool = False
) -> Callable[..., Any]:
    """Call a function with a smaller `batch_size` whenever memory runs out; also a decorator.

    `TrainingArguments(auto_find_batch_size=True)` does not restart: it splits the batch and keeps the step.

    Args:
        function: Takes the batch size as its first argument.
        starting_batch_size: The first size to try.
        auto_find_batch_size: Whether to try smaller sizes.

    Source: the documented `find_executable_batch_size`.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            auto_find_batch_size=auto_find_batch_size,
        )
    if not auto_find_batch_size:
        return functools.partial(function, batch_size=starting_batch_size)
    from accelerate.utils import find_executable_batch_size as find

    found: Callable[..., Any] = find(function=function, starting_batch_size=starting_batch_size)
    return found


def neftune_post_forward_hook(module: Any, input: Any, output: torch.Tensor) -> torch.Tensor:
    """Forward hook that adds NEFTune's noise to embeddings in training.

    The module's `neftune_noise_alpha` scales the noise. `TrainingArguments(neftune_noise_alpha=...)` does it for a run.

    Source: the documented `neftune_post_forward_hook`; Jain et al., 2023, arXiv 2310.05914.
    """
    if not module.training:
        return output
    reach = module.neftune_noise_alpha / (output.size(1) * output.size(2)) ** 0.5
    return output + torch.zeros_like(output).uniform_(-reach, reach)
