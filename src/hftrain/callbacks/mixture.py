"""Several training sets as one, with weights that may change during a training."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from hftrain.callbacks.base import ExportableState, TrainerCallback
from hftrain.core.errors import ConfigError
from hftrain.core.lengths import read_length
from hftrain.data.datasets import has_length, has_state, whole_dataset
from hftrain.data.mixing import MixedStream, MixtureSampler, StatefulMixedStream
from hftrain.data.positions import samples_per_round
from hftrain.data.sharding import DispatchLoader
from hftrain.data.streams import is_cut_stream

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


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

    def __new__(cls, sets: Any = None, **_: Any) -> Any:
        """Return a stream for streams."""
        found = [_split(each)[0] for each in sets.values()] if isinstance(sets, Mapping) else []
        if cls is Mixture and any(isinstance(each, IterableDataset) for each in found):
            return super().__new__(_StatefulMixture if all(map(has_state, found)) else _StreamMixture)
        return super().__new__(cls)

    def __init__(
        self, sets: Mapping[str, Any], *, mode: str = "min_size", window: int = 100, epoch_size: int | None = None
    ) -> None:
        self.names, self.mode, self.window, self.epoch_size = list(sets), mode, window, epoch_size
        self.datasets: list[Any] = [_split(each)[0] for each in sets.values()]
        given = [_split(each)[1] for each in sets.values()]
        self._check_arguments(given)
        # By set, and there by when.
        self._weights = [each if isinstance(each, Mapping) else {0: 1.0 if each is None else each} for each in given]
        self.lengths = [0 if isinstance(each, IterableDataset) else len(each) for each in self.datasets]
        # From this pass and this draw of it on, the shares.
        self.history: Any = [[0, 0, self._shares([each.get(0) for each in self._weights])]]
        self.sets = [list(pair) for pair in zip(self.names, self.history[0][2], strict=True)]
        # By set: the samples, and of streams the passes, that were trained on in earlier passes over the mixture.
        self.trained, self.passes = [0] * len(self.names), [0] * len(self.names)
        self.seed, self._sampler = 42, MixtureSampler(self, seed=42)
        self._parts: Any = None
        # The draws of a micro-step, 0 if unknown; the pass, its draws that were trained on, and those that are counted.
        self._round, self._epoch = 0, 0
        self._begin_pass()

    def _check_arguments(self, weights: list[Any]) -> None:
        sizes = (self.window, 1 if self.epoch_size is None else self.epoch_size)
        if self.mode not in MODES or min(sizes) < 1 or not self.names:
            raise ConfigError(
                f"Cannot mix {len(self.names)} sets with mode={self.mode!r}, window={self.window} and "
                f"epoch_size={self.epoch_size}.",
                "There is at least one set, and sizes are above 0.",
                f"The modes are {', '.join(MODES)}.",
            )
        if self.mode == "sequential" and any(weight is not None for weight in weights):
            raise ConfigError(
                "Cannot use weights with mode='sequential'.", "Each set is read to its end.", "Pass the datasets alone."
            )
        streams = [isinstance(each, IterableDataset) for each in self.datasets]
        for name, dataset, is_stream in zip(self.names, self.datasets, streams, strict=True):
            is_plain = (
                has_length(dataset) and len(dataset) and not (has_state(dataset) or hasattr(dataset, "set_epoch"))
            )
            if is_stream != any(streams) or not (is_stream or is_plain):
                raise ConfigError(
                    f"Cannot mix {name!r}, a {type(dataset).__name__}.",
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

    @property
    def is_scheduled(self) -> bool:
        """Whether a weight changes by the update."""
        return any(len(each) > 1 for each in self._weights)

    def __len__(self) -> int:
        if self.epoch_size is not None:
            return self.epoch_size
        if self.mode in ("max_size", "sequential"):
            return sum(self.lengths)
        passes: list[float] = [
            length / weight for length, weight in zip(self.lengths, self.history[0][2], strict=True) if weight
        ]
        # 29 / 0.29 is a little less than 100.
        return math.floor(min(passes) + 1e-6) if self.mode == "min_size" else math.ceil(max(passes) - 1e-6)

    def __getitem__(self, place: Any) -> Any:
        """Return the sample of a set, given the numbers of both."""
        if not isinstance(place, tuple):
            raise ConfigError(
                f"Cannot read sample {place!r} of a Mixture.",
                "Its own sampler decides which samples come.",
                "Iterate the mixture, or pass sampler=mixture.train_sampler(seed=42) to a DataLoader.",
            )
        number, index = place
        return self.datasets[number][index]

    def __iter__(self) -> Iterator[Any]:
        """Iterate the first pass."""
        return map(self.__getitem__, MixtureSampler(self, seed=self.seed))

    def train_sampler(self, *, seed: int, shuffle: bool = True) -> MixtureSampler:
        """Return the order of the samples; a Trainer reads them in it."""
        self._sampler = MixtureSampler(self, seed=seed, shuffle=shuffle)
        return self._sampler

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Change the weights, from the first sample that no loader has drawn yet; call it on all processes.

        Loaders draw ahead: one batch, or for each worker ``dataloader_prefetch_factor`` batches.

        Raises:
            ConfigError: A set has no weight or a schedule, or workers read streams, which the change cannot reach.
        """
        if sorted(weights) != sorted(self.names) or self.is_scheduled:
            raise ConfigError(
                f"Cannot change the weights to {dict(weights)}.",
                "A schedule gives them." if self.is_scheduled else f"The sets are {', '.join(self.names)}.",
                "Give each set one weight, also at the start.",
            )
        self.history.append([*self._next_draw(), self._shares([weights[name] for name in self.names])])

    def _next_draw(self) -> tuple[int, int]:
        return self._sampler.epoch, self._sampler.position

    # -- a training ------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the changes of the weights, and what was trained on in the passes that are over."""
        saved = {"saved_sets": self.sets, "history": self.history, "trained": self.trained, "passes": self.passes}
        return {"attributes": copy.deepcopy(saved)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start from the first weights, unless the run is resumed."""
        saved = vars(self).pop("saved_sets", self.sets)
        if saved != self.sets:
            raise ConfigError(
                f"Cannot resume with a mixture of {dict(self.sets)}.",
                f"That of the checkpoint is of {dict(saved)}.",
                "Begin with the same sets and weights, and change weights by a schedule or with set_weights().",
            )
        self.seed = args.seed if args.data_seed is None else args.data_seed
        self._begin_pass()
        if state.global_step == 0:
            self.history = [change for change in self.history if change[:2] == [0, 0]]
            self.trained, self.passes = [0] * len(self.names), [0] * len(self.names)

    def wrap_parts(self, parts: Any) -> Any:
        """Return the loop's parts, with logs that count the samples of each set."""
        loader = getattr(parts.feed, "loader", None)
        if whole_dataset(getattr(_reader(loader), "dataset", None)) is not self:
            return parts
        self._parts, hooks = parts, parts.hooks
        self._measure(loader, _reader(loader), parts.config.world_size)
        self.on_step_end(None, None, None)

        def before_epoch() -> None:
            if self.is_scheduled:
                self._plan_epoch(parts.progress, parts.config)
            hooks.before_epoch()

        def log(logs: dict[str, Any]) -> None:
            hooks.log({**logs, **self._logs()})

        return replace(parts, hooks=replace(hooks, before_epoch=before_epoch, log=log))

    def _measure(self, loader: Any, inner: Any, world_size: int) -> None:
        self._round = samples_per_round(loader, world_size=world_size) or 0
        if self.is_scheduled and not self._round:
            raise ConfigError(
                f"Cannot change weights by the update with a {type(loader).__name__}.",
                "How many samples an update takes is unknown.",
                "Let the Trainer make the loader.",
            )

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count what a pass that is over was trained on."""
        if self._parts is not None and self._parts.progress.epoch > self._epoch:
            self.trained, self.passes = self._totals()
            self._begin_pass()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the position in the pass."""
        if self._parts is not None:
            self._epoch, self._position = self._parts.progress.epoch, _position(self._parts.progress, self._round)

    def _begin_pass(self) -> None:
        self._sampler.drawn.clear()
        self._counted, self._position = [0] * len(self.names), 0

    def close_run(self) -> None:
        """Forget the run's parts."""
        self._parts = None

    def _totals(self) -> tuple[list[int], list[int]]:
        """Return the samples that were trained on of each set, and of streams the complete passes."""
        drawn = self._sampler.drawn
        while drawn and sum(self._counted) < self._position:
            self._counted[drawn.popleft()] += 1
        return [a + b for a, b in zip(self.trained, self._counted, strict=True)], self.passes

    def _logs(self) -> dict[str, Any]:
        if not self._round:
            return {}
        trained, passes = self._totals()
        epochs = [n / length if length else own for n, length, own in zip(trained, self.lengths, passes, strict=True)]
        found = [*zip(self.names, trained, epochs, strict=True)]
        samples = {f"mixture_{name}_samples": number for name, number, _ in found}
        return samples | {f"mixture_{name}_epochs": number for name, _, number in found}

    def _plan_epoch(self, progress: Any, config: Any) -> None:
        """Find the draws of this pass with which the scheduled weights change; earlier passes stay as they were."""
        epoch, begin = progress.epoch, _position(progress, self._round)
        self.history = [change for change in self.history if (change[0], change[1]) <= (epoch, begin)]
        points = [sorted((_step(when, config), weight) for when, weight in each.items()) for each in self._weights]
        for step in sorted({max(step, progress.step) for each in points for step, _ in each}):
            weights = [[weight for since, weight in each if since <= step][-1] for each in points]
            place = begin + (step - progress.step) * config.accumulation * self._round
            if self.history[-1][2] != self._shares(weights):
                self.history.append([epoch, place, self._shares(weights)])


class _StreamMixture(MixedStream, Mixture):
    """A mixture of streams; each loader worker mixes its own part of them."""

    def __len__(self) -> int:
        if self.epoch_size is None:
            raise TypeError("A mixture of streams has no length without epoch_size.")
        return self.epoch_size

    def _measure(self, loader: Any, inner: Any, world_size: int) -> None:
        size, is_cut = inner.batch_size or 1, is_cut_stream(inner.dataset)
        self.turn = size * (world_size if is_cut else 1)
        self._round = size * (world_size if is_cut or isinstance(loader, DispatchLoader) else 1)
        if inner.persistent_workers and self.is_scheduled:
            raise ConfigError(
                "Cannot change the weights of streams in workers that outlive a pass.",
                "Each holds a copy of the mixture, which does not learn of a later change.",
                "Set dataloader_persistent_workers=False.",
            )

    def _next_draw(self) -> tuple[int, int]:
        if self._parts is not None and _reader(self._parts.feed.loader).num_workers:
            raise ConfigError(
                "Cannot change the weights of streams that workers read.",
                "Each holds a copy of the mixture.",
                "Use dataloader_num_workers=0, sets with a length, or a schedule.",
            )
        return self.epoch, self.cursor.position

    def _totals(self) -> tuple[list[int], list[int]]:
        pairs = ((self.trained, self.cursor.counts), (self.passes, self.cursor.passes))
        trained, passes = ([a + b for a, b in zip(*pair, strict=True)] for pair in pairs)
        return trained, passes

    def _logs(self) -> dict[str, Any]:
        return {} if _reader(self._parts.feed.loader).num_workers else super()._logs()


class _StatefulMixture(StatefulMixedStream, _StreamMixture):
    """A mixture of streams that all save their positions."""


def _split(given: Any) -> tuple[Any, Any]:
    """Return a dataset and its weight, None if there is none."""
    is_pair = isinstance(given, tuple) and len(given) == 2
    weight = given[1] if is_pair else None
    numbers = weight.values() if isinstance(weight, Mapping) else [weight]
    has_weight = all(isinstance(number, (int, float)) for number in numbers)
    return (given[0], weight) if has_weight else (given, None)


def _reader(loader: Any) -> Any:
    return loader.loader if isinstance(loader, DispatchLoader) else loader


def _position(progress: Any, size: int) -> int:
    """Return the draws that were trained on in this pass."""
    return int(progress.offset_in_epoch + progress.micro_steps_in_epoch * size)


def _step(when: Any, config: Any) -> int:
    """Return the update at which a weight begins."""
    if isinstance(when, int):
        return when
    length, per_pass = read_length(when), -(-(config.num_batches or 0) // config.accumulation)
    value, unit = (0.0, "ba") if length is None else length[:2]
    updates: float = value * {"ba": 1, "dur": config.max_steps, "ep": per_pass}.get(unit, 0)
    if not updates:
        raise ConfigError(
            f"Cannot change a weight at {when!r}.",
            "It is not a number of updates, or a pass has an unknown length.",
            "Write it like 500, '500ba', '2ep' or '0.8dur'.",
        )
    return round(updates)
