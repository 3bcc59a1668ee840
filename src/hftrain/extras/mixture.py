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
        pairs = map(_dataset_and_weight, sets.values() if isinstance(sets, Mapping) else ())
        is_stream = cls is Mixture and any(isinstance(dataset, IterableDataset) for dataset, _ in pairs)
        return super().__new__(_StreamMixture if is_stream else cls)

    def __init__(
        self, sets: Mapping[str, Any], *, mode: str = "min_size", window: int = 100, epoch_size: int | None = None
    ) -> None:
        pairs = list(map(_dataset_and_weight, sets.values() if isinstance(sets, Mapping) else ()))
        self.names, self.datasets = list(sets), [dataset for dataset, _ in pairs]
        self.mode, self.window, self.epoch_size, self.seed = mode, window, epoch_size, 42
        self._check_arguments([weight for _, weight in pairs])
        self.is_once = mode in ("max_size", "sequential")
        # By set, and there by when.
        weights = [1.0 if weight is None else weight for _, weight in pairs]
        self._schedules = [weight if isinstance(weight, Mapping) else {0: weight} for weight in weights]
        self.is_scheduled = any(len(schedule) > 1 for schedule in self._schedules)
        self.lengths = [0 if isinstance(dataset, IterableDataset) else len(dataset) for dataset in self.datasets]
        self.shares = self._to_shares([schedule.get(0) for schedule in self._schedules])
        if mode == "sequential":
            # The sets without a share follow in order.
            self.window, self.shares = 1, [float(not number) for number in range(len(pairs))]
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
        for name, dataset in zip(self.names, self.datasets, strict=True):
            has_own_order = has_state(dataset) or hasattr(dataset, "set_epoch")
            is_indexed = has_length(dataset) and len(dataset) and not has_own_order
            if not (isinstance(dataset, IterableDataset) if is_stream else is_indexed):
                raise ConfigError(
                    f"Cannot mix {name!r}, a {type(dataset).__name__}.",
                    "All sets are streams, or all have samples by index, and neither a state nor a set_epoch.",
                    "Make streams of all: datasets.Dataset.to_iterable_dataset(), or an IterableDataset of yours.",
                )

    def _to_shares(self, weights: list[Any]) -> list[float]:
        are_numbers = all(isinstance(weight, (int, float)) and 0 <= weight < math.inf for weight in weights)
        if not are_numbers or not sum(weights):
            raise ConfigError(
                f"Cannot mix {', '.join(self.names)} with the weights {', '.join(map(str, weights))}.",
                "Weights are numbers from 0, not all of them 0, and a schedule begins with update 0.",
                "Pass shares such as 0.8 and 0.2.",
            )
        return [float(weight) / sum(weights) for weight in weights]

    def __len__(self) -> int:
        if self.is_once:
            return min(sum(self.lengths), self.epoch_size or sum(self.lengths))
        num_draws = [length / share for length, share in zip(self.lengths, self.shares, strict=True) if share]
        # 29 / 0.29 is a little less than 100.
        num = math.floor(min(num_draws) + 1e-6) if self.mode == "min_size" else math.ceil(max(num_draws) - 1e-6)
        return self.epoch_size or num

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, tuple):
            raise ConfigError(
                f"Cannot read sample {index!r} of a Mixture.",
                "Its own sampler decides which samples come.",
                "Iterate the mixture, or pass sampler=mixture.train_sampler(seed=42) to a DataLoader.",
            )
        return self.datasets[index[0]][index[1]]

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
        is_unreachable = isinstance(self, IterableDataset) and (self.progress is None or self._workers)
        is_planned = self.is_scheduled or self.mode == "sequential"
        if sorted(weights) != sorted(self.names) or is_planned or is_repeated or is_unreachable:
            raise ConfigError(
                f"Cannot change the weights to {dict(weights)}.",
                f"The sets are {', '.join(self.names)}. No change is possible with a schedule, mode='sequential', "
                "overfit_batches, streams that workers read, or a dataset around the mixture.",
                "Give each set one weight, and read streams with dataloader_num_workers=0, or use a schedule.",
            )
        shares = self._to_shares([weights[name] for name in self.names])
        # After a resume nothing may be drawn yet, or less than the first time.
        position = max(drawn, self.place, self.history[-1][:2])
        # The same again, as a callback may set after a resume, must not begin a window.
        if shares != self.history[-1][2]:
            self.history.append([*position, shares])
            self._sampler.num_dealt = min(self._sampler.num_dealt, position[1])

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
        self._round_size = 0
        # The pass whose changes by a schedule are in the history (None: no Trainer reads, so the first weights hold).
        self.planned = -1 if isinstance(self, IterableDataset) else None
        self._begin_pass()

    def _begin_pass(self) -> None:
        self._sampler = MixtureSampler(self, seed=self.seed)

    def state(self) -> dict[str, Any]:
        """Return the changes of the weights, and what was trained on."""
        attributes = {name: getattr(self, name) for name in ("history", "trained", "place")}
        return {"attributes": copy.deepcopy({"saved_as": self._identity, **attributes})}

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
        self._measure_round(loader, reader, parts.config.world_size)
        self.on_step_end(None, None, None)
        self._plan_changes()
        hooks = replace(parts.hooks, log=lambda logs: parts.hooks.log({**logs, **self._logs()}))
        return replace(parts, hooks=hooks)

    def _measure_round(self, loader: Any, reader: Any, world_size: int) -> None:
        self._sampler.set_epoch(self.progress.epoch)
        self._round_size = samples_per_round(loader, world_size=world_size) or 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (progress := self.progress) is not None:
            self.place = [progress.epoch, progress.offset_in_epoch + progress.micro_steps_in_epoch * self._round_size]

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count what a pass that is over was trained on."""
        if self.progress is not None and self.progress.epoch > self.place[0]:
            self.trained = self._count_trained()
            self.on_step_end(None, None, None)
            # Of the changes before this pass, only the last one counts.
            self.history = self.history[sum(change[:2] <= self.place for change in self.history) - 1 :]
            self._plan_changes()

    def _count_trained(self) -> Any:
        """Return the samples that were trained on of each set, and of streams the complete passes."""
        num_draws = self.place[1] if self._round_size else self._sampler.position
        return [np.add(self.trained[0], self._sampler.counts(num_draws)).tolist(), self.trained[1]]

    def _logs(self) -> dict[str, Any]:
        logs = {}
        for name, length, trained, passes in zip(self.names, self.lengths, *self._count_trained(), strict=True):
            logs[f"mixture_{name}_samples"] = trained
            logs[f"mixture_{name}_epochs"] = trained / length if length else passes
        return logs if self._round_size and not self._workers else {}

    def _plan_changes(self) -> None:
        """Find the draws of this pass with which the scheduled weights change; earlier passes stay as they were."""
        if not self.is_scheduled:
            return
        progress, config = self.progress, self._config
        # A callback may have changed how many batches an update takes.
        self.planned = progress.epoch if self._round_size and config.accumulation == self._accumulation else -1
        shares_at(self, progress.epoch, 0)
        self.history = [change for change in self.history if change[:2] <= self.place]
        changes = [[(update_of(when, config), weight) for when, weight in by.items()] for by in self._schedules]
        for step in sorted({max(step, progress.step) for of_set in changes for step, _ in of_set}):
            weights = [max((since, weight) for since, weight in of_set if since <= step)[1] for of_set in changes]
            shares = self._to_shares(weights)
            if self.history[-1][2] != shares:
                draw = self.place[1] + (step - progress.step) * config.accumulation * self._round_size
                self.history.append([progress.epoch, draw, shares])


class _StreamMixture(Mixture, IterableDataset[Any]):
    """A mixture of streams; each loader worker mixes its own part of them."""

    # The last one: samples in a row that the loader takes from one worker.
    epoch, num_dealt, _is_loaded, _turn_size = 0, 0, False, 1

    def __init__(self, sets: Mapping[str, Any], **options: Any) -> None:
        super().__init__(sets, **options)
        self._first_states: list[Any] = []
        if all(map(has_state, self.datasets)):
            self._first_states = [copy.deepcopy(dataset.state_dict()) for dataset in self.datasets]
            self.state_dict, self.load_state_dict = self._save, self._load

    def _begin_pass(self) -> None:
        """Set where a pass is: the draws, the first one with the present shares, and by set draws, passes, if open."""
        zeros, self._sampler = [0] * len(self.names), self
        self._cursor: Any = SimpleNamespace(position=0, start=0, counts=[*zeros], passes=[*zeros], is_open=[*zeros])

    @property
    def position(self) -> int:
        """The draws of the latest iteration."""
        return int(self._cursor.position)

    def _measure_round(self, loader: Any, reader: Any, world_size: int) -> None:
        size, self.epoch, self._workers = reader.batch_size or 1, self.progress.epoch, reader.num_workers
        self._turn_size = size * (world_size if is_cut(reader.dataset) else 1)
        # Workers that outlive a pass would not learn of later changes.
        self._round_size = size * world_size if isinstance(loader, DispatchLoader) else self._turn_size
        self._round_size *= not reader.persistent_workers

    def _count_trained(self) -> Any:
        return np.add(self.trained, [self._cursor.counts, self._cursor.passes] if self.place[1] else 0).tolist()

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
        return self._draw_samples(self._cursor)

    def _draw_samples(self, cursor: Any) -> Iterator[Any]:
        """Draw windows until the weights change, then begin again with the new ones: no window mixes two shares."""
        readers = [self._read_stream(number, cursor) for number in range(len(self.datasets))]
        limit = math.inf if self.epoch_size is None else self.epoch_size
        while not self._is_over(cursor) and self._position_of_all(cursor.position) < limit:
            change, position = self.history[-1], self._position_of_all(cursor.start)
            seed = derive_seed(self.seed, self.epoch, cursor.start)
            shares, _, end = shares_at(self, self.epoch, position)
            unread = np.where(cursor.passes, 0, math.inf) if self.is_once else None
            windows = deal_sets(shares, window=self.window, seed=seed, total=limit - position, left=unread)
            numbers = chain.from_iterable(map(np.ndarray.tolist, windows))
            for number in islice(numbers, cursor.position - cursor.start, None):
                # Weights may also have been changed since.
                if self._position_of_all(cursor.position) >= min(end, limit) or self.history[-1] is not change:
                    break
                sample = next(readers[number], _END)
                if sample is _END:
                    break
                cursor.position += 1
                cursor.counts[number] += 1
                yield sample
            cursor.start = cursor.position

    def _is_over(self, cursor: Any) -> bool:
        if self.mode == "min_size" or (self.epoch_size and not self.is_once):
            return any(cursor.passes) and not self.epoch_size
        # A set that no change gives a weight is not waited for.
        shares_by_set = zip(*(shares for _, _, shares in self.history), strict=True)
        is_needed = [self.is_once or any(shares) for shares in shares_by_set]
        return all(passes or not needed for passes, needed in zip(cursor.passes, is_needed, strict=True))

    def _read_stream(self, number: int, cursor: Any) -> Iterator[Any]:
        """Iterate a stream, from its start again if the mode says so."""
        dataset, num_empty = self.datasets[number], 0
        # The rest of a pass may be empty after a resume.
        while num_empty < 2:
            if self._first_states and not cursor.is_open[number]:
                dataset.load_state_dict(copy.deepcopy(self._first_states[number]))
            cursor.is_open[number], num_empty = True, num_empty + 1
            for sample in dataset:
                num_empty = 0
                yield sample
            cursor.is_open[number] = False
            cursor.passes[number] += 1
            if self.is_once or self._is_over(cursor):
                return
        raise TaskError(
            f"Cannot read set {number} of a mixture again.", "It gave no sample.", "Check how it was made or filtered."
        )

    def _position_of_all(self, position: int) -> int:
        """Return the place of a draw among those of all workers, which take turns."""
        worker = get_worker_info()
        num_workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        return (position // self._turn_size * num_workers + worker_id) * self._turn_size + position % self._turn_size

    def _save(self) -> dict[str, Any]:
        """Return the position in the pass, and the states of the streams that it has begun."""
        pairs = zip(self.datasets, self._cursor.is_open, strict=True)
        streams = [dataset.state_dict() if is_open else None for dataset, is_open in pairs]
        return copy.deepcopy({"at": vars(self._cursor), "streams": streams})

    def _load(self, state: Mapping[str, Any]) -> None:
        state = copy.deepcopy(dict(state))
        self._cursor, self._is_loaded = SimpleNamespace(**state["at"]), True
        for dataset, stream_state in zip(self.datasets, state["streams"], strict=True):
            if stream_state is not None:
                dataset.load_state_dict(stream_state)


def _dataset_and_weight(entry: Any) -> tuple[Any, Any]:
    """Return a dataset and its weight, None if there is none."""
    is_pair = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[1], (int, float, Mapping))
    return entry if is_pair else (entry, None)
