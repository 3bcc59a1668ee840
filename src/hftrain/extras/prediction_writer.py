"""Write predictions to files batch by batch, on each process separately."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from hftrain.callbacks.base import TrainerCallback
from hftrain.core.errors import TaskError
from hftrain.core.extras import extra
from hftrain.core.log import warn_once
from hftrain.core.state import TrainerControl, TrainerState
from hftrain.core.tree import is_cache
from hftrain.data.samplers import reading_order
from hftrain.data.sharding import takes_turns
from hftrain.storage.files import check_url, is_url, local_folder, read_json, write_text
from hftrain.storage.shards import load_tensors
from hftrain.storage.tensors import save_tensors

_FILE_NAME = re.compile(r"rank[0-9]+(-[0-9]{5}\.safetensors|\.json)")


class PredictionWriter(TrainerCallback):
    """Write the predictions and labels of `Trainer.predict` to files batch by batch; each data rank writes its own.

    `predict()` then gathers nothing and returns None for predictions and labels, unless `returns_predictions` is set.
    Each `predict()` replaces the files of the previous one. The files of data rank ``<rank>`` (the
    process, unless several read the same samples):

    - ``rank<rank>-<number>.safetensors``: up to `batches_per_file` batches. A tensor is named ``<batch>/outputs`` or
      ``<batch>/labels``, and in nested outputs ``<batch>/outputs/<key or index>``; batches count from 0 in each
      process.
    - ``rank<rank>.json``: written last: how many batches this process had, how many processes there were, whether they
      took batches in turn (streams, `dispatch_batches`) or each had a run of consecutive ones, and the files' names.

    Args:
        folder: The folder of the files; created if needed. `read` needs the files of all processes, so machines need a
            shared folder or a URL. To a URL, files are uploaded when `predict()` ends; its local mirror keeps a copy.
        batches_per_file: How many batches are collected before a file is written.
        returns_predictions: Whether `predict()` also returns the predictions.

    Raises:
        ConfigError: The folder's URL scheme is unknown.
        MissingDependencyError: The package of the folder's store is not installed.
    """

    def __init__(self, folder: str | Path, *, batches_per_file: int = 64, returns_predictions: bool = False) -> None:
        check_url(folder)
        self._remote = extra("remote").RemoteFolder(str(folder)) if is_url(folder) else None
        self.folder = local_folder(folder, start=Path.cwd())
        self.replaces_predictions = not returns_predictions
        self._batches_per_file = batches_per_file
        self._start(None)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, outputs: Any = None, **kwargs: Any
    ) -> None:
        """Write a batch's predictions; evaluations are ignored.

        Raises:
            TaskError: The predictions contain something other than tensors.
        """
        rank, _, is_copy = _data_rank(args, **kwargs)
        if outputs is None or is_copy:
            return
        self._start_if_new(kwargs.get("eval_dataloader"), rank)
        tensors = _flatten_tensors({"outputs": outputs, "labels": kwargs.get("labels")}, f"{self._num_batches}")
        # Copied, because a model's output may be a view of a larger tensor, or be overwritten later.
        self._buffer |= {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._num_batches += 1
        if self._num_batches % self._batches_per_file == 0:
            self._write(rank)

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Write the remaining batches and the list of this process's files."""
        rank, world_size, is_copy = _data_rank(args, **kwargs)
        if is_copy:
            return
        if reading_order(eval_dataloader) is not None:
            warn_once("PredictionWriter writes batches as they are read: sortish_sampler=True sorts them by length.")
        # Needed if this process had no batch.
        self._start_if_new(eval_dataloader, rank)
        if self._buffer:
            self._write(rank)
        listing = {
            "num_batches": self._num_batches,
            "world_size": world_size,
            "is_interleaved": takes_turns(eval_dataloader),
            "batches_per_file": self._batches_per_file,
            "files": self._files,
        }
        write_text(self.folder / f"rank{rank}.json", json.dumps(listing, indent=2) + "\n")
        if self._remote is not None:
            for name in [*self._files, f"rank{rank}.json"]:
                self._remote.upload(self.folder / name, name)
        self._start(None)

    @staticmethod
    def read(folder: str | Path) -> Iterator[dict[str, torch.Tensor]]:
        """Yield every process's batches in the data's order, as ``{"outputs": ..., "labels": ...}`` by flat name.

        Raises:
            TaskError: The files of a process are missing because its `predict()` did not finish.
        """
        if is_url(folder):
            with tempfile.TemporaryDirectory() as local:
                remote = extra("remote").RemoteFolder(str(folder))
                for name in filter(_FILE_NAME.fullmatch, remote.names()):
                    remote.download(name, Path(local) / name)
                yield from PredictionWriter.read(local)
            return
        folder = Path(folder)
        first_listing = _read_listing(folder, 0)
        listings = [_read_listing(folder, rank) for rank in range(first_listing["world_size"])]
        per_rank = [_read_batches(folder, rank) for rank in listings]
        if first_listing["is_interleaved"]:
            for turn in zip_longest(*per_rank):
                yield from (batch for batch in turn if batch is not None)
        else:
            for batches in per_rank:
                yield from batches

    def _start_if_new(self, loader: Any, rank: int) -> None:
        """Replace the files if the loader is a new one: a new predict(), even if the previous one failed."""
        if self._loader is not loader:
            self._start(loader)
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in (self.folder / f"rank{rank}.json", *self.folder.glob(f"rank{rank}-*.safetensors")):
                path.unlink(missing_ok=True)
            if self._remote is not None:
                # The list first, because files without it count as incomplete.
                self._remote.delete_file(f"rank{rank}.json")
                for name in self._remote.names():
                    if name.startswith(f"rank{rank}-"):
                        self._remote.delete_file(name)

    def _start(self, loader: Any) -> None:
        self._loader = loader
        self._buffer: dict[str, torch.Tensor] = {}
        self._files: list[str] = []
        self._num_batches = 0

    def _write(self, rank: int) -> None:
        self._files.append(f"rank{rank}-{len(self._files):05d}.safetensors")
        save_tensors(self._buffer, self.folder / self._files[-1])
        self._buffer = {}


def _data_rank(args: Any, *, data_ranks: Any = None, **_: Any) -> tuple[int, int, bool]:
    """Return the data rank, their number, and whether another process has the same predictions."""
    if data_ranks is None:  # called by a loop of the user's
        return args.process_index, args.world_size, False
    return data_ranks.rank, data_ranks.world_size, data_ranks.copy > 0


def _flatten_tensors(tree: Any, name: str) -> dict[str, torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return {name: tree}
    if tree is None or is_cache(tree):
        return {}
    if isinstance(tree, Mapping):
        entries: Any = tree.items()
    elif isinstance(tree, (list, tuple)):
        entries = enumerate(tree)
    else:
        raise TaskError(
            "Predictions were to be written to files.",
            f"They hold a {type(tree).__name__}, and the files take tensors only.",
            "Leave it out with ignore_keys or preprocess_logits_for_metrics.",
        )
    return {path: leaf for key, value in entries for path, leaf in _flatten_tensors(value, f"{name}/{key}").items()}


def _read_listing(folder: Path, rank: int) -> dict[str, Any]:
    path = folder / f"rank{rank}.json"
    if not path.exists():
        raise TaskError(
            f"The predictions in {str(folder)!r} were to be read.",
            f"{path.name} is missing: process {rank} has not written all its predictions, or wrote them elsewhere.",
            "Run predict() to its end, with a folder that all processes share.",
        )
    listing: dict[str, Any] = read_json(path)
    return listing


def _read_batches(folder: Path, listing: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    size = listing["batches_per_file"]
    for number, file in enumerate(listing["files"]):
        tensors = load_tensors(folder / Path(file).name)
        for batch in range(number * size, min((number + 1) * size, listing["num_batches"])):
            prefix = f"{batch}/"
            yield {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
