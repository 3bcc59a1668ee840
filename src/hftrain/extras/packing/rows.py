"""Documents of tokens packed into rows of one length, whose positions keep them apart."""

from __future__ import annotations

import copy
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.extras import extra
from hftrain.data.datasets import has_state, tell_epoch
from hftrain.data.samplers import is_rank_aware
from hftrain.extras.packing.checks import check_packed_rows

Row = dict[str, torch.Tensor]
# Its tokens, and a label for each.
Document = tuple[torch.Tensor, torch.Tensor]
# A part of a document: its number, its first token, and the token after its last one.
Piece = tuple[int, int, int]

PACKINGS = ("bfd", "wrapped")
IGNORED_LABEL = -100


def pack_dataset(dataset: Any, length: int, *, packing: str = "bfd", buffer_size: int = 1000) -> Any:
    """Pack documents of tokens into rows of `length`, without padding each of them.

    Every row is ``input_ids``, ``labels`` and ``position_ids``, in tensors that any batch size can stack: use
    `default_data_collator`. The positions restart at each document, by which a model keeps it apart from its neighbours
    in the row; a Trainer refuses a model that does not. The label of a document's first token is -100, so that no
    document predicts the next one. The rest of a row is padded with one more document whose labels are -100.

    Which documents share a row does not depend on the epoch; the rows are shuffled, split among processes, and resumed
    like any samples. A document that is longer than a row is cut, and the positions of each part begin at 0.

    Args:
        dataset: Samples with ``input_ids`` and, if they are not the labels as well, ``labels``; map-style or a stream.
        length: Tokens in a row.
        packing: ``"bfd"`` (best fit, longest first) cuts only documents that are longer than a row; ``"wrapped"`` fills
            each row to its end, in the order of the documents, and cuts them there.
        buffer_size: Documents of a stream that are packed together. If the stream saves its position, a resume reads
            those of one buffer again, so they must not be random.

    Returns:
        A dataset of rows for a dataset with a length, else a stream of rows.

    Shapes:
        input_ids, labels, position_ids: ``[length]``, int64.

    Raises:
        ConfigError: An argument is not allowed, or samples have no ``input_ids``, or a stream is split among processes.

    Example:
        >>> rows = pack_dataset([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], 6)
        >>> rows[0]["input_ids"].tolist(), rows[0]["position_ids"].tolist(), rows[0]["labels"].tolist()
        ([5, 6, 7, 8, 9, 0], [0, 1, 2, 0, 1, 0], [-100, 6, 7, -100, 9, -100])
    """
    if packing not in PACKINGS:
        raise ConfigError(f"Cannot use packing={packing!r}.", "There are two.", f"Pass one of {', '.join(PACKINGS)}.")
    for name, number, minimum in (("length", length, 2), ("buffer_size", buffer_size, 1)):
        if type(number) is not int or number < minimum:
            raise ConfigError(
                f"Cannot use {name}={number!r}.", "It is a number of tokens or documents.", f"Pass {minimum} or more."
            )
    if isinstance(dataset, IterableDataset):
        if is_rank_aware(dataset):
            raise ConfigError(
                f"Cannot pack a {type(dataset).__name__} that gives each process its own share:",
                "each would get another number of rows.",
                "Pack the whole stream; the rows are split among the processes.",
            )
        kind = _StatefulPackedStream if has_state(dataset) else PackedStream
        return kind(dataset, length, packing=packing, buffer_size=buffer_size)
    return PackedDataset(dataset, length, packing=packing)


class PackedDataset(Dataset[Row]):
    """The rows of a map-style dataset; see `pack_dataset`. The lengths of all documents are read once."""

    check_run = staticmethod(check_packed_rows)

    def __init__(self, dataset: Any, length: int, *, packing: str) -> None:
        self.dataset, self.length = dataset, length
        grouping = extra("grouping")
        lengths = grouping.sample_lengths(dataset, grouping.LengthConfig())
        rows = _fill_rows(lengths, length, packing)
        # Flat arrays: lists of tuples would take ten times the memory.
        self._pieces = numpy.array([piece for row in rows for piece in row], dtype=numpy.int64).reshape(-1, 3)
        self._ends = numpy.cumsum([len(row) for row in rows])

    def __getitem__(self, index: int) -> Row:
        index = range(len(self))[index]  # negative numbers, and an IndexError beyond the end
        pieces = self._pieces[self._ends[index - 1] if index else 0 : self._ends[index]].tolist()
        documents = {number: _document(self.dataset[number]) for number, _, _ in pieces}
        return _row(_parts(documents, pieces), self.length)

    def __len__(self) -> int:
        return len(self._ends)


class PackedStream(IterableDataset[Row]):
    """The rows of a stream; see `pack_dataset`. Each loader worker packs its own part of the stream."""

    check_run = staticmethod(check_packed_rows)

    def __init__(self, dataset: Any, length: int, *, packing: str, buffer_size: int) -> None:
        self.dataset, self.length = dataset, length
        self._packing, self._buffer_size = packing, buffer_size
        self._keeps_state = has_state(dataset)
        # The documents of the buffer that were read before `_after`, the state of the stream.
        self._first_documents: list[Document] = []
        self._state_after: Any = None
        self._num_rows = 0
        self._is_last = self._is_loaded = False

    @property
    def generator(self) -> Any:
        """The stream's own generator, which is seeded for each epoch."""
        return getattr(self.dataset, "generator", None)

    def set_epoch(self, epoch: int) -> None:
        """Forward the epoch to a stream that has `set_epoch`."""
        tell_epoch(self.dataset, epoch)

    def __iter__(self) -> Iterator[Row]:
        is_loaded, self._is_loaded = self._is_loaded, False
        if not is_loaded:
            self._first_documents, self._state_after, self._num_rows, self._is_last = [], None, 0, False
        return self._rows(iter(self.dataset), is_loaded=is_loaded)

    def _rows(self, documents: Iterator[Any], *, is_loaded: bool) -> Iterator[Row]:
        while True:
            if not is_loaded:
                # One document is read before the state is taken: many streams start over only at their first one.
                first = [_document(sample) for sample in islice(documents, 1)]
                self._first_documents, self._is_last = [*self._first_documents, *first], not first
                self._state_after = copy.deepcopy(self.dataset.state_dict()) if self._keeps_state else None
            is_loaded = False
            rest = [] if self._is_last else [_document(sample) for sample in islice(documents, self._buffer_size - 1)]
            is_last = self._is_last or len(rest) < self._buffer_size - 1
            buffer = [*self._first_documents, *rest]
            rows = _fill_rows((len(ids) for ids, _ in buffer), self.length, self._packing)
            unfinished = [] if is_last or self._packing == "bfd" else rows[-1:]
            for row in rows[self._num_rows : len(rows) - len(unfinished)]:
                # Counted first: a state that is saved now begins after this row.
                self._num_rows += 1
                yield _row(_parts(buffer, row), self.length)
            if is_last:
                return
            self._first_documents, self._num_rows = [part for row in unfinished for part in _parts(buffer, row)], 0


class _StatefulPackedStream(PackedStream):
    """A packed stream whose documents come from a stream that saves its position."""

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the current buffer, and the rows read of it."""
        # Before the first row of a pass it is the stream's own state.
        after = copy.deepcopy(self.dataset.state_dict()) if self._state_after is None else self._state_after
        head = [[ids.tolist(), labels.tolist()] for ids, labels in self._first_documents]
        begun = {"is_begun": self._state_after is not None, "is_last": self._is_last}
        return {"stream": after, "head": head, "num_rows": self._num_rows, **begun}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.dataset.load_state_dict(copy.deepcopy(state["stream"]))
        self._first_documents = [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in state["head"]]
        self._num_rows, self._is_last = int(state["num_rows"]), bool(state["is_last"])
        self._is_loaded = bool(state["is_begun"])
        self._state_after = state["stream"] if self._is_loaded else None


def _fill_rows(lengths: Iterable[int], length: int, packing: str) -> list[list[Piece]]:
    return (_best_fit if packing == "bfd" else _wrap)([int(size) for size in lengths], length)


def _wrap(lengths: Sequence[int], length: int) -> list[list[Piece]]:
    """Fill each row to its end, in the order of the documents, which are cut there."""
    rows: list[list[Piece]] = []
    room = 0
    for number, size in enumerate(lengths):
        start = 0
        while start < size:
            if not room:
                rows.append([])
                room = length
            stop = min(size, start + room)
            rows[-1].append((number, start, stop))
            room -= stop - start
            start = stop
    return rows


def _best_fit(lengths: Sequence[int], length: int) -> list[list[Piece]]:
    """Put each piece, from long to short, into the fullest row that has room for it, which leaves little padding."""
    pieces = [
        (number, start, min(start + length, size))
        for number, size in enumerate(lengths)
        for start in range(0, size, length)
    ]
    pieces.sort(key=lambda piece: piece[1] - piece[2])  # from long to short; stable
    rows: list[list[Piece]] = []
    # The rows by the room that they have left, and these rooms in order.
    open_rows: dict[int, list[int]] = {}
    free_spaces: list[int] = []
    for piece in pieces:
        size = piece[2] - piece[1]
        position = bisect_left(free_spaces, size)
        if position < len(free_spaces):
            space = free_spaces[position]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del free_spaces[position], open_rows[space]
        else:
            space, row = length, len(rows)
            rows.append([])
        rows[row].append(piece)
        if space > size:
            if space - size not in open_rows:
                insort(free_spaces, space - size)
            open_rows.setdefault(space - size, []).append(row)
    return rows


def _document(sample: Any) -> Document:
    if not isinstance(sample, Mapping) or "input_ids" not in sample:
        raise TaskError(
            "Cannot pack a sample:", "it has no 'input_ids'.", "Tokenize texts first (dataset.map) and pack the result."
        )
    ids = torch.as_tensor(sample["input_ids"], dtype=torch.int64)
    labels = torch.as_tensor(sample["labels"], dtype=torch.int64) if "labels" in sample else ids
    if ids.dim() != 1 or labels.shape != ids.shape:
        raise TaskError(
            "Cannot pack a sample:",
            f"its input_ids have the shape {list(ids.shape)} and its labels {list(labels.shape)}.",
            "Give it one list of tokens, and each token one label: -100 for those that are not trained on.",
        )
    return ids, labels


def _parts(documents: Any, pieces: Iterable[Piece]) -> list[Document]:
    return [
        (ids[start:stop], labels[start:stop]) for number, start, stop in pieces for ids, labels in (documents[number],)
    ]


def _row(parts: list[Document], length: int) -> Row:
    """Join parts of documents to one row, padded with a document of its own that is not trained on."""
    padding = length - sum(len(ids) for ids, _ in parts)
    if padding:
        parts = [*parts, (torch.zeros(padding, dtype=torch.int64), torch.full((padding,), IGNORED_LABEL))]
    labels = torch.cat([labels for _, labels in parts])
    labels[numpy.cumsum([0, *(len(ids) for ids, _ in parts[:-1])])] = IGNORED_LABEL
    return {
        "input_ids": torch.cat([ids for ids, _ in parts]),
        "labels": labels,
        "position_ids": torch.cat([torch.arange(len(ids)) for ids, _ in parts]),
    }
