"""One safetensors file per process, with its rows of tensors that are split along the first dimension."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from hftrain.core.errors import CheckpointError
from hftrain.core.types import Shard
from hftrain.storage.files import unreadable
from hftrain.storage.tensors import check_header, load_tensors, save_tensors

_ROWS = "hftrain.rows"


def save_shards(shards: Mapping[str, Shard], folder: Path, *, stem: str, rank: int, world_size: int) -> None:
    """Write one process's shards; writes no file if there are none.

    Args:
        shards: The shards by name. The file's metadata records which rows they are, and of how many.
    """
    if shards:
        rows = {name: [shard.start, shard.length] for name, shard in shards.items() if shard.start is not None}
        path = folder / f"{stem}-{rank:05d}-of-{world_size:05d}.safetensors"
        tensors = {name: shard.rows for name, shard in shards.items()}
        save_tensors(tensors, path, metadata={_ROWS: json.dumps(rows, sort_keys=True)})


def find_shards(folder: Path, *, stem: str) -> list[Path]:
    """List the files that `save_shards` wrote, ordered by rank."""
    pattern = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}\.safetensors")
    return sorted(path for path in folder.iterdir() if pattern.fullmatch(path.name)) if folder.is_dir() else []


def load_shards(folder: Path, *, stem: str) -> dict[str, torch.Tensor]:
    """Merge the shards of all processes, on the CPU; independent of the current number of processes."""
    whole: dict[str, torch.Tensor] = {}
    parts: dict[str, list[tuple[int, int, torch.Tensor]]] = {}
    for path in find_shards(folder, stem=stem):
        rows = _rows_in(path)
        for name, tensor in load_tensors(path).items():
            if name in rows:
                parts.setdefault(name, []).append((*rows[name], tensor))
            else:
                whole[name] = tensor
    for name, found in parts.items():
        found.sort(key=lambda part: part[0])
        expected = 0
        for start, length, tensor in found:
            is_next = start == expected and length == found[0][1] and tensor.dim() > 0
            is_next = is_next and (tensor.dtype, tensor.shape[1:]) == (found[0][2].dtype, found[0][2].shape[1:])
            expected = expected + len(tensor) if is_next else -1
        if expected != found[0][1]:
            raise CheckpointError(
                f"Cannot read {name} from {folder}.",
                f"Some of its {found[0][1]} rows are missing or duplicated.",
                "Copy the files of all processes, or use another checkpoint.",
            )
        whole[name] = torch.cat([tensor for _, _, tensor in found])
    return whole


def _rows_in(path: Path) -> dict[str, Any]:
    try:
        check_header(path)
        with safe_open(path, framework="pt") as file:
            rows = json.loads((file.metadata() or {})[_ROWS])
        return {name: (int(start), int(length)) for name, (start, length) in rows.items()}
    except Exception as error:
        raise unreadable(path, f"It is damaged: {error!r}") from error
