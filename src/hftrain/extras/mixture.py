"""Several training sets as one, with weights that may change during a training."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from hftrain.callbacks.base import ExportableState, TrainerCallback
from hftrain.core.errors import ConfigError, TaskError
from hftrain.data.datasets import has_length, has_state, set_dataset_epoch, whole_dataset
from hftrain.data.mixing import MixtureSampler, deal_sets, shares_at, update_of
from hftrain.data.samplers import is_cut
from hftrain.data.seeding import derive_seed
from hftrain.data.sharding import DispatchLoader
from hftrain.data.states import samples_per_round

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
_END = object()


class Mixture(TrainerCallback, ExportableState, Dataset[Any]):
    """Several training sets as one: ``Trainer(train_dataset=Mixture({"web": (web, 0.8), "code": (code, 0.2)}))``.

    Every set has its share in each window of draws, in random order. It is read in passes of its own: no sample comes
    again before all others have come. Map-style sets continue where the last pass over the mixture ended, streams start
    again. Several processes split the draws of one. Logs hold ``mixture_<name>_samples`` and ``mixture_<name>_epochs``:
    what all were trained on (of streams complete passes, and nothing if workers read them). A resume is exact.

    Args:
        sets: By name, a dataset and its weight, or a dataset alone, whose weight is 1. All are map-style, or all are
            streams. A weight may change by the update: ``{0: 1.0, 500: 0.5, "0.8dur": 0.1}``, also ``"2ep"``.
        mode: When a pass over the mixture ends: ``"min_size"`` when the first set has been read once,
            ``"max_size_cycle"`` when all have been, the others several times; ``"max_size"`` reads each sample once and
            continues without the sets that have ended; ``"sequential"`` reads one set after the other. The first
            weights decide how long a pass over map-style sets is.
        window: Draws in a window. With the total batch size, every update has the exact shares.
        epoch_size: Draws in a pass; None follows from the mode.

    Raises:
        ConfigError: The sets, their weights or an argument cannot be used.

    Example:
        >>> mixture = Mixture({"a": ([1, 2, 3, 4], 0.75), "b": ([-1, -2], 0.25)}, window=4)
        >>> len(mixture), sum(number < 0 for number in list(mixture)[:4])
        (5, 1)
    """

    # A resume gives the state to this instance.
    is_rebuilt = False
    _sampler: Any
    # Those that read streams.
    _workers = 0

    def __new__(cls, sets: Any = None, **_: Any) -> Any:
        found = map(_split, sets.values() if isinstance(sets, Mapping) else ())
        is_stream = cls is Mixture and any(isinstance(dataset, IterableDataset) for dataset, _ in found)
        return super().__new__(_StreamMixture if is_stream else cls)

    def __init__(
        self, sets: Mapping[str, Any], *, mode: str = "min_size", window: int = 100, epoch_size: int | None = None
    ) -> None:
        given = list(map(_split, sets.values() if isinstance(sets, Mapping) else ()))
        self.names, self.datasets = list(sets), [dataset for dataset, _ in given]
        self.mode, self.window, self.epoch_size, self.seed = mode, window, epoch_size, 42
        self._check_arguments([weight for _, weight in given])
        self.is_once = mode in ("max_size", "sequential")
        # By set, and there by when.
        self._weights = [each if isinstance(each, Mapping) else {0: 1.0 if each is None else each} for _, each in given]
        self.is_scheduled = any(len(each) > 1 for each in self._weights)
        self.lengths = [0 if isinstance(each, IterableDataset) else len(each) for each in self.datasets]
        self.shares = self._shares([each.get(0) for each in self._weights])
        if mode == "sequential":
            # The sets without a share follow in order.
            self.window, self.shares = 1, [float(not number) for number in range(len(given))]
        self._identity = [self.names, self.shares, self.lengths, mode, window, epoch_size]
        self.close_run()

    def _check_arguments(self, weights: list[Any]) -> None:
        sizes = (self.window, 1 if self.epoch_size is None else self.epoch_size)
        is_weighted = any(weight is not None for weight in weights)
        if self.mode not in MODES or min(sizes) < 1 or not weights or (self.mode == "sequential" and is_weighted):
            raise ConfigError(
                f"Cannot mix {len(weights)} sets by mode={self.mode!r}, window={sizes[0]} and epoch_size={sizes[1]}.",
                "There is at least one set, sizes are above 0, and 'sequential' takes the datasets alone, unweighted.",
                f"Pass a dict, {{'a': dataset, 'b': (another, 0.25)}}. The modes are {', '.join(MODES)}.",
            )
        is_stream = isinstance(self, IterableDataset)
        for name, each in zip(self.names, self.datasets, strict=True):
            is_plain = has_length(each) and len(each) and not (has_state(each) or hasattr(each, "set_epoch"))
            if not (isinstance(each, IterableDataset) if is_stream else is_plain):
                raise ConfigError(
                    f"Cannot mix {name!r}, a {type(each).__name__}.",
                    "All sets are streams, or all have samples by index, and neither a state nor a set_epoch.",
                    "Make streams of all: datasets.Dataset.to_iterable_dataset(), or an IterableDataset of yours.",
                )

    def _shares(self, weights: list[Any]) -> list[float]:
        if not all(isinstance(each, (int, float)) and 0 <= each < math.inf for each in weights) or not sum(weights):
            raise ConfigError(
                f"Cannot mix {', '.join(self.names)} with the weights {', '.join(map(str, weights))}.",
                "Weights are numbers from 0, not all of them 0, and a schedule begins with update 0.",
                "Pass shares such as 0.8 and 0.2.",
            )
        return [float(each) / sum(weights) for each in weights]

    def __len__(self) -> int:
        if self.is_once:
            return min(sum(self.lengths), self.epoch_size or sum(self.lengths))
        passes: list[float] = [length / share for length, share in zip(self.lengths, self.shares, strict=True) if share]
        # 29 / 0.29 is a little less than 100.
        found = math.floor(min(passes) + 1e-6) if self.mode == "min_size" else math.ceil(max(passes) - 1e-6)
        return self.epoch_size or found

    def __getitem__(self, place: Any) -> Any:
        if not isinstance(place, tuple):
            raise ConfigError(
                f"Cannot read sample {place!r} of a Mixture.",
                "Its own sampler decides which samples come.",
                "Iterate the mixture, or pass sampler=mixture.train_sampler(seed=42) to a DataLoader.",
            )
        return self.datasets[place[0]][place[1]]

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, MixtureSampler(self, seed=self.seed))

    def train_sampler(self, *, seed: int, shuffle: bool = True) -> Any:
        """Return the order of the samples; a Trainer reads them in it."""
        self._sampler = MixtureSampler(self, seed=seed, shuffle=shuffle)
        return self._sampler

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights, from the first sample that no loader has drawn yet; call it on all processes.

        Loaders draw ahead: one batch, or for each worker ``dataloader_prefetch_factor`` batches.

        Raises:
            ConfigError: A set has no weight, others decide the weights, or the change cannot reach who reads streams.
        """
        drawn = [self._sampler.epoch, self._sampler.position]
        is_repeated = self.progress is not None and self.place[1] and drawn[0] != self.place[0]
        # Workers hold copies of the mixture, and only a Trainer that reads it itself saves the change.
        is_apart = isinstance(self, IterableDataset) and (self.progress is None or self._workers)
        is_given = self.is_scheduled or self.mode == "sequential"
        if sorted(weights) != sorted(self.names) or is_given or is_repeated or is_apart:
            raise ConfigError(
                f"Cannot change the weights to {dict(weights)}.",
                f"The sets are {', '.join(self.names)}. No change is possible with a schedule, mode='sequential', "
                "overfit_batches, streams that workers read, or a dataset around the mixture.",
                "Give each set one weight, and read streams with dataloader_num_workers=0, or use a schedule.",
            )
        shares = self._shares([weights[name] for name in self.names])
        # After a resume nothing may be drawn yet, or less than the first time.
        place = max(drawn, self.place, self.history[-1][:2])
        # The same again, as a callback may set after a resume, must not begin a window.
        if shares != self.history[-1][2]:
            self.history.append([*place, shares])
            self._sampler.num_dealt = min(self._sampler.num_dealt, place[1])

    # -- a training ------------------------------------------------------------------------------------------------

    def close_run(self) -> None:
        """Forget the run."""
        # From this pass and this draw of it on, the shares.
        self.history: list[Any] = [[0, 0, self.shares]]
        # By set, the samples, and the passes of streams, of earlier passes; the pass, and the draws trained on in it.
        self.trained, self.place = [[0] * len(self.names) for _ in range(2)], [0, 0]
        # Of the Trainer that reads the mixture itself; the draws of its micro-steps (0: unknown).
        self.progress: Any = None
        self._config: Any = None
        self._round = 0
        # The pass whose changes by a schedule are in the history (None: no Trainer reads, so the first weights hold).
        self.planned = -1 if isinstance(self, IterableDataset) else None
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._sampler = MixtureSampler(self, seed=self.seed)

    def state(self) -> dict[str, Any]:
        """Return the changes of the weights, and what was trained on."""
        own = {name: getattr(self, name) for name in ("history", "trained", "place")}
        return {"attributes": copy.deepcopy({"saved_as": self._identity, **own})}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse to continue another mixture."""
        saved = vars(self).pop("saved_as", self._identity)
        if saved != self._identity:
            raise ConfigError(
                f"Cannot resume with a mixture of {self._identity} (names, shares, lengths, mode, window, epoch_size).",
                f"That of the checkpoint is {saved}.",
                "Begin with the same sets and weights, and change weights by a schedule or with set_weights().",
            )
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self._accumulation = args.gradient_accumulation_steps

    def wrap_parts(self, parts: Any) -> Any:
        """Return the loop's parts, with logs that count the samples of each set."""
        loader = getattr(parts.feed, "loader", None)
        reader = loader.loader if isinstance(loader, DispatchLoader) else loader
        if whole_dataset(getattr(reader, "dataset", None)) is not self:
            return parts
        self.progress, self._config = parts.progress, parts.config
        self._measure(loader, reader, parts.config.world_size)
        self.on_step_end(None, None, None)
        self._plan()
        hooks = replace(parts.hooks, log=lambda logs: parts.hooks.log({**logs, **self._logs()}))
        return replace(parts, hooks=hooks)

    def _measure(self, loader: Any, reader: Any, world_size: int) -> None:
        self._sampler.set_epoch(self.progress.epoch)
        self._round = samples_per_round(loader, world_size=world_size) or 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (at := self.progress) is not None:
            self.place = [at.epoch, at.offset_in_epoch + at.micro_steps_in_epoch * self._round]

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count what a pass that is over was trained on."""
        if self.progress is not None and self.progress.epoch > self.place[0]:
            self.trained = self._totals()
            self.on_step_end(None, None, None)
            # Of the changes before this pass, only the last one counts.
            self.history = self.history[sum(change[:2] <= self.place for change in self.history) - 1 :]
            self._plan()

    def _totals(self) -> Any:
        """Return the samples that were trained on of each set, and of streams the complete passes."""
        place = self.place[1] if self._round else self._sampler.position
        return [np.add(self.trained[0], self._sampler.counts(place)).tolist(), self.trained[1]]

    def _logs(self) -> dict[str, Any]:
        logs = {}
        for name, length, trained, passes in zip(self.names, self.lengths, *self._totals(), strict=True):
            logs[f"mixture_{name}_samples"] = trained
            logs[f"mixture_{name}_epochs"] = trained / length if length else passes
        return logs if self._round and not self._workers else {}

    def _plan(self) -> None:
        """Find the draws of this pass with which the scheduled weights change; earlier passes stay as they were."""
        if not self.is_scheduled:
            return
        at, config = self.progress, self._config
        # A callback may have changed how many batches an update takes.
        self.planned = at.epoch if self._round and config.accumulation == self._accumulation else -1
        shares_at(self, at.epoch, 0)
        self.history = [change for change in self.history if change[:2] <= self.place]
        points = [sorted((update_of(when, config), weight) for when, weight in each.items()) for each in self._weights]
        for step in sorted({max(step, at.step) for each in points for step, _ in each}):
            shares = self._shares([[weight for since, weight in each if since <= step][-1] for each in points])
            if self.history[-1][2] != shares:
                draw = self.place[1] + (step - at.step) * config.accumulation * self._round
                self.history.append([at.epoch, draw, shares])


class _StreamMixture(Mixture, IterableDataset[Any]):
    """A mixture of streams; each loader worker mixes its own part of them."""

    # The last one: samples in a row that the loader takes from one worker.
    epoch, num_dealt, _is_loaded, _turn = 0, 0, False, 1

    def __init__(self, sets: Mapping[str, Any], **options: Any) -> None:
        super().__init__(sets, **options)
        self._firsts: list[Any] = []
        if all(map(has_state, self.datasets)):
            self._firsts = [copy.deepcopy(each.state_dict()) for each in self.datasets]
            self.state_dict, self.load_state_dict = self._save, self._load

    def _begin_pass(self) -> None:
        """Set where a pass is: the draws, the first one with the present shares, and by set draws, passes, if open."""
        zeros, self._sampler = [0] * len(self.names), self
        self._at: Any = SimpleNamespace(position=0, start=0, counts=[*zeros], passes=[*zeros], is_open=[*zeros])

    @property
    def position(self) -> int:
        """The draws of the latest iteration."""
        return int(self._at.position)

    def _measure(self, loader: Any, reader: Any, world_size: int) -> None:
        size, self.epoch, self._workers = reader.batch_size or 1, self.progress.epoch, reader.num_workers
        self._turn = size * (world_size if is_cut(reader.dataset) else 1)
        # Workers that outlive a pass would not learn of later changes.
        self._round = size * world_size if isinstance(loader, DispatchLoader) else self._turn
        self._round *= not reader.persistent_workers

    def _totals(self) -> Any:
        return np.add(self.trained, [self._at.counts, self._at.passes] if self.place[1] else 0).tolist()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if not self._is_loaded:
            self._begin_pass()
        for number, dataset in enumerate(self.datasets):
            set_dataset_epoch(dataset, epoch=epoch, seed=self.seed + number)

    def __len__(self) -> int:
        if self.epoch_size is None:
            raise TypeError("A mixture of streams has no length without epoch_size.")
        return self.epoch_size

    def __iter__(self) -> Iterator[Any]:
        if not self._is_loaded:
            # Now, not at the first sample: a state that is saved before it is that of this pass.
            self._begin_pass()
        self._is_loaded = False
        return self._draws(self._at)

    def _draws(self, at: Any) -> Iterator[Any]:
        readers = [self._read(number, at) for number in range(len(self.datasets))]
        limit = math.inf if self.epoch_size is None else self.epoch_size
        while not self._is_over(at) and self._common(at.position) < limit:
            last, place, seed = self.history[-1], self._common(at.start), derive_seed(self.seed, self.epoch, at.start)
            shares, _, until = shares_at(self, self.epoch, place)
            left = np.where(at.passes, 0, math.inf) if self.is_once else None
            windows = deal_sets(shares, window=self.window, seed=seed, total=limit - place, left=left)
            numbers = chain.from_iterable(map(np.ndarray.tolist, windows))
            for number in islice(numbers, at.position - at.start, None):
                # Weights may also have been changed since.
                if self._common(at.position) >= min(until, limit) or self.history[-1] is not last:
                    break
                sample = next(readers[number], _END)
                if sample is _END:
                    break
                at.position += 1
                at.counts[number] += 1
                yield sample
            at.start = at.position

    def _is_over(self, at: Any) -> bool:
        if self.mode == "min_size" or (self.epoch_size and not self.is_once):
            return any(at.passes) and not self.epoch_size
        # A set that no change gives a weight is not waited for.
        weighted = map(any, zip(*(change[2] for change in self.history), strict=True))
        return all(passes or not (self.is_once or each) for passes, each in zip(at.passes, weighted, strict=True))

    def _read(self, number: int, at: Any) -> Iterator[Any]:
        """Iterate a stream, from its start again if the mode says so."""
        dataset, num_empty = self.datasets[number], 0
        # The rest of a pass may be empty after a resume.
        while num_empty < 2:
            if self._firsts and not at.is_open[number]:
                dataset.load_state_dict(copy.deepcopy(self._firsts[number]))
            at.is_open[number], num_empty = True, num_empty + 1
            for sample in dataset:
                num_empty = 0
                yield sample
            at.is_open[number] = False
            at.passes[number] += 1
            if self.is_once or self._is_over(at):
                return
        raise TaskError(
            f"Cannot read set {number} of a mixture again.", "It gave no sample.", "Check how it was made or filtered."
        )

    def _common(self, place: int) -> int:
        """Return the place of a draw among those of all workers, which take turns."""
        worker = get_worker_info()
        num, own = (worker.num_workers, worker.id) if worker else (1, 0)
        return (place // self._turn * num + own) * self._turn + place % self._turn

    def _save(self) -> dict[str, Any]:
        """Return the position in the pass, and the states of the streams that it has begun."""
        pairs = zip(self.datasets, self._at.is_open, strict=True)
        streams = [each.state_dict() if is_open else None for each, is_open in pairs]
        return copy.deepcopy({"at": vars(self._at), "streams": streams})

    def _load(self, state: Mapping[str, Any]) -> None:
        state = copy.deepcopy(dict(state))
        self._at, self._is_loaded = SimpleNamespace(**state["at"]), True
        for dataset, found in zip(self.datasets, state["streams"], strict=True):
            if found is not None:
                dataset.load_state_dict(found)


def _split(given: Any) -> tuple[Any, Any]:
    """Return a dataset and its weight, None if there is none."""
    is_pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], (int, float, Mapping))
    return given if is_pair else (given, None)
