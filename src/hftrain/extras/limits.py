"""Fewer batches than there are: per pass, per evaluation, or the same few in each pass, to try a run out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.data.datasets import has_length, has_state, preserved_data
from hftrain.data.feed import TrainFeed
from hftrain.data.loaders import Limits


class SetLimits(Limits):
    """Read as many batches of each process as a Trainer's settings say.

    Args:
        **settings: Those of `Trainer` whose names end with ``_batches``.
    """

    def __init__(self, **settings: int | float | None) -> None:
        facts = {name: value for name, value in settings.items() if value is not None}
        for name, value in facts.items():
            kinds = (int,) if name == "sanity_eval_batches" else (int, float)
            if type(value) not in kinds or value <= 0 or (type(value) is float and value > 1):
                raise ConfigError(
                    f"Cannot use Trainer({name}={value!r}).",
                    "It says how many batches to read: 1 is one batch, and a share of 1.0 are all.",
                    f"Pass a whole number above 0{' or a share such as 0.1' * (float in kinds)}, or leave it out.",
                )
        if {"limit_train_batches", "overfit_batches"} <= facts.keys():
            raise ConfigError(
                "Cannot use both limit_train_batches and overfit_batches:",
                "both say how many batches a pass has, and only the second that they are the same ones in each.",
                "Keep one of the two.",
            )
        self.sanity_eval_batches, self.facts = int(facts.pop("sanity_eval_batches", 0)), facts
        self.of_training = {name: value for name, value in facts.items() if name != "limit_eval_batches"}
        name = "limit_eval_batches" if "limit_eval_batches" in facts else "overfit_batches"
        self.of_evaluation = {name: facts[name]} if name in facts else {}

    def num_train(self, num_batches: int | None) -> int | None:
        return _limited(self.of_training, num_batches)

    def for_evaluation(self, loader: Any) -> Any:
        if not self.of_evaluation:
            return loader
        number = _limited(self.of_evaluation, len(loader) if has_length(loader) else None)
        return loader if number is None else FirstBatches(loader, number)


class FirstBatches:
    """The first batches of a loader, with its other attributes except the samplers, which order the whole dataset."""

    sampler = batch_sampler = None

    def __init__(self, loader: Any, number: int) -> None:
        self._loader = loader
        self.num_first = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return min(len(self._loader), self.num_first)

    def __iter__(self) -> Iterator[Any]:
        with preserved_data(getattr(self._loader, "dataset", None)):
            yield from islice(self._loader, self.num_first)


class LimitedFeed(TrainFeed):
    """The first batches of each pass; the same ones, in the order of the first pass, with `overfit_batches`.

    Raises:
        ConfigError: The data saves its own position. After a part of a pass that is neither the data's start nor its
            end, and a resumed run would begin the next pass there.
    """

    def __init__(self, loader: Any, *, limits: Limits, **options: Any) -> None:
        super().__init__(loader, **options)
        self._limits = limits
        for part in (self._reader, getattr(self._reader, "dataset", None)):
            if part is not None and has_state(part):
                raise ConfigError(
                    f"Cannot use {next(iter(limits.of_training))} with a {type(part).__name__}:",
                    "it saves its position, which after a part of a pass is that of the middle of the data.",
                    "Pass a shorter dataset, such as dataset.take(100), or set max_steps.",
                )

    @property
    def num_batches(self) -> int | None:
        return self._limits.num_train(super().num_batches)

    def open(self, epoch: int, *, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        # The order follows from the pass's number.
        epoch = 0 if "overfit_batches" in self._limits.of_training else epoch
        batches, number = super().open(epoch, skip=skip, offset=offset), self.num_batches
        return batches if number is None else islice(batches, max(0, number - skip))


def _limited(setting: Mapping[str, int | float], num_batches: int | None) -> int | None:
    for name, value in setting.items():
        if isinstance(value, int):
            return value if num_batches is None else min(value, num_batches)
        if num_batches is None:
            raise ConfigError(
                f"Cannot use {name}={value}.", "The data has no length to take a share of.", "Pass a number of batches."
            )
        # 0.29 * 100 is a little less than 29.
        number = int(round(value * num_batches, 6))
        if not number:
            raise ConfigError(
                f"Cannot use {name}={value}.",
                f"That is less than one of the {num_batches} batches of a process.",
                f"Pass a larger share, or {name}=1 for one batch.",
            )
        return number
    return num_batches
