"""The sizes of a mesh that a script leaves to `hftrain plan`, which runs it up to its training and tells what fits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch

from hftrain.core.launcher import outside_of_launch, read_launch
from hftrain.strategies.base import Strategy
from hftrain.strategies.mesh.layout import AUTO, DIMS, Layout, refusal


def choose(strategy: Strategy, given: Mapping[str, Any], uses: Collection[str], memory: str | None) -> dict[str, Any]:
    """Return the best proposal of `hftrain plan` with the sizes that are given, and say why. Collective.

    The main process runs the script once more, in a process of its own, up to its first `train()`; the micro-batch and
    checkpointing stay as the script sets them.

    Args:
        strategy: The launched strategy.
        given: Sizes by dimension: a number, ``"auto"``, or None where none was named.
        uses: The dimensions that the strategy's name promises.
        memory: The memory of a device, such as ``"80GB"``; None asks the device.

    Raises:
        ConfigError: The processes run no file, it cannot be planned, or nothing fits.
    """
    shown = memory or f"{min(strategy.gather_object(_memory_of(strategy))) / 1e9:.3f}GB"
    told = strategy.broadcast_object(_ask(strategy.world_size, shown) if strategy.is_main else None)
    if isinstance(told, str):
        raise refusal(given, f'"auto" asks `hftrain plan`, which says: {told}', "Name the sizes.")
    free = {dim for dim in DIMS if given[dim] == AUTO or (given[dim] is None and dim in (*uses, "dp_shard"))}
    fixed = {dim: given[dim] or 1 for dim in DIMS if dim not in free}
    fits = [each for each in told["fits"] if fixed.items() <= each["sizes"].items()]
    if not fits:
        reason = f"`hftrain plan` finds nothing of these sizes that fits {strategy.world_size} devices of {shown}."
        raise refusal(given, reason, "Leave more sizes to it, use a smaller micro-batch or gradient_checkpointing.")
    best: dict[str, Any] = fits[0]
    if strategy.is_main:
        held = sum(best[name] for name in ("parameters", "gradients", "optimizer", "activations", "temporary")) / 1e9
        print(
            f"The mesh is {Layout(**best['sizes'])}: of {len(fits)} that fit, it waits and communicates least. "
            f"A device of {shown} holds {held:.3g} GB at most. `hftrain plan --as-set` shows the others.",
            flush=True,
        )
    return best


def _ask(num_processes: int, memory: str) -> dict[str, Any] | str:
    """Return what `hftrain plan` prints for this script, or its error."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None:
        return "Nothing can be run again, as in a notebook."
    machine = str(read_launch().local_world_size or num_processes)
    command = [sys.executable, "-c", "from hftrain.cli.commands import main; main()", "plan", "--as-set", "--json"]
    command += ["--gpus", str(num_processes), "--gpus-per-machine", machine, "--memory", memory, script, *sys.argv[1:]]
    done = subprocess.run(command, env=outside_of_launch(), capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return said[-1].removeprefix("hftrain plan: ")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _memory_of(strategy: Strategy) -> int:
    """Return the bytes of this process's device; of the host's memory, its share."""
    if strategy.device_type != "cpu":
        total: int = getattr(torch, strategy.device_type).get_device_properties(strategy.device).total_memory
        return total
    import psutil

    return int(psutil.virtual_memory().total) // (read_launch().local_world_size or 1)
