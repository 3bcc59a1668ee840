"""The batches of the training loop: one iterator per epoch, starting at any position."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hftrain.core.log import get_logger
from hftrain.core.seed import plain_rng, preserved_rng, restore_rng, rng_devices, rng_now
from hftrain.core.tree import map_tensors, tensors_of
from hftrain.data.datasets import has_length, has_state, load_state, set_dataset_epoch, tell_epoch
from hftrain.data.loaders import noticing_copies
from hftrain.data.samplers import Later, give_generator, is_cut, samplers_of
from hftrain.data.seeding import (
    derive_seed,
    find_user_seed,
    new_generator,
    seed_generator,
    with_own_numbers,
    with_own_numbers_later,
)
from hftrain.data.sharding import DispatchLoader, RankLoader, is_plain_loader
from hftrain.data.states import StatefulLoader, begin_at

_logger = get_logger(__name__)

# What must be unchanged for the state of a stream or loader to be valid.
_SETTINGS = ("num_workers", "batch_size")
_END = object()


class TrainFeed:
    """Open a training loader at any batch of any epoch, with the same data every time.

    Works with hftrain's loaders and with any iterable of batches that a user's override returns. A torch loader or
    sampler that would draw from the global generator gets its own generator; mutates them.

    Args:
        expects_save: Returns whether a checkpoint is planned for the end of the next step. If it is given, map-style
            data of hftrain's loaders in this process is collated one batch ahead.

    Attributes:
        own_seeds: For each generator in a torch loader, the user's seed, or None if the data seed
            is used. The ranks that share a loader's samples need the same seeds.

    Example:
        >>> feed = TrainFeed([10, 11, 12], seed=0)
        >>> feed.num_batches, list(feed.open(0, skip=1))
        (3, [11, 12])
    """

    def __init__(self, loader: Iterable[Any], *, seed: int, expects_save: Callable[[], bool] | None = None) -> None:
        self.loader = loader
        self._seed = seed
        # The state that was loaded, until a batch is read after it, and whether the next pass begins there.
        self._state: dict[str, Any] | None = None
        self._begins_at_state = False
        # Undoes what loading a state has set in a dataset of this process.
        self._undo_load: Callable[[], None] | None = None
        self._has_begun = self._is_open = self._is_at_end = False
        if isinstance(loader, DispatchLoader):
            loader = loader.loader
        self._reader: Any = loader
        self._expects_save = expects_save if _is_random_access(self.loader) else None
        # The batch that was collated ahead, and the state of the random numbers before, if that was copied.
        self._next_batch: Any = _END
        self._rng_state: dict[str, Any] | None = None
        loader = getattr(loader, "base_dataloader", loader)  # the loader inside accelerate's
        if isinstance(loader, DataLoader) and issubclass(type(loader), DataLoader):
            if loader.generator is None:
                loader.generator = new_generator(seed)
            give_generator(loader, seed=seed)
        self._generators = _generators_of(self.loader)
        seeds = map(find_user_seed, self._generators)
        self.own_seeds = [None if user_seed == seed else user_seed for user_seed in seeds]
        # The loader of the latest pass, what it skips, and the length that it stated before its first batch.
        self._current_pass: tuple[Any, int] = self.loader, 0
        self._stated_length = self._length()

    @property
    def num_batches(self) -> int | None:
        """Batches of this rank in the latest pass, those skipped included; None if unknown or stated differently."""
        return self._stated_length if self._stated_length == self._length() else None

    def _length(self) -> int | None:
        loader, num_skipped = self._current_pass
        return len(loader) + num_skipped if has_length(loader) else None

    @property
    def is_stream(self) -> bool:
        """Whether the data can only be iterated."""
        return isinstance(getattr(self._reader, "dataset", None), IterableDataset)

    def draws_a_seed(self, epoch: int) -> bool:
        """Return whether a number is to be drawn as a torch loader does at a pass: persistent workers get one once."""
        reader = self._reader
        return isinstance(reader, DataLoader) and not (epoch and reader.persistent_workers)

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loader and of the dataset, if they have one, as of the latest batch."""
        if self._state is not None:
            return self._state
        reader = self._reader
        state = {name: getattr(reader, name, None) for name in _SETTINGS}
        if any(seed is not None for seed in self.own_seeds):
            state["own_seeds"] = list(self.own_seeds)
        if self._is_open and has_state(reader):
            state["loader"] = copy.deepcopy(reader.state_dict())
        if _is_read_here(reader) and has_state(reader.dataset):
            state["dataset"] = copy.deepcopy(reader.dataset.state_dict())
        if self._rng_state is not None:
            state["numbers"] = plain_rng(self._rng_state)
        elif self._next_batch is not _END:
            state["ahead"] = tensors_of(self._next_batch)
            if not _is_made_of_tensors(self._next_batch):
                _logger.warning(
                    "The next batch is not made of tensors alone, as the first was: a resume may change it."
                )
        return state

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Use the result of `state_dict` at the next `open`; None skips batches instead, other values raise."""
        facts = {} if state is None else state
        is_fit = isinstance(facts, dict) and not any(isinstance(facts.get(name), torch.Tensor) for name in _SETTINGS)
        own_seeds = facts.get("own_seeds", []) if is_fit else None
        is_fit = is_fit and all(isinstance(tensor, torch.Tensor) for tensor in facts.get("ahead", ()))
        if not is_fit or not isinstance(own_seeds, list) or not all(isinstance(seed, int | None) for seed in own_seeds):
            raise ValueError("The state of the training data is none that was saved.")
        if "numbers" in facts:
            with preserved_rng():  # check now that it is valid
                restore_rng(facts["numbers"])
        self._state, self._begins_at_state = state, True

    def take_over(self, feed: TrainFeed) -> None:
        """Use at the next `open` the state that another feed has loaded and not used yet."""
        self._state, self._begins_at_state = feed._state if feed._begins_at_state else None, feed._begins_at_state

    def close(self) -> None:
        """Put a dataset of this process back to where it was before a state was loaded, for a new run."""
        if self._undo_load is not None:
            self._undo_load()
            self._undo_load = None

    def open(self, epoch: int, *, skip: int = 0, offset: int = 0) -> Iterator[Any]:
        """Start an epoch.

        Calls `set_epoch` on every object of the loading pipeline that has it, and seeds every generator there
        with the epoch plus the user's own seed, or else the data seed; mutates them. Persistent workers keep
        running, except that a skip starts new ones for this epoch.

        Args:
            epoch: The number of the pass, from 0.
            offset: Samples of all ranks together to skip before the first batch; see `begin_at`.
            skip: Batches to skip after them. A stream or loader with a state resumes from it. For map-style data
                only indices are drawn; other batches are read and dropped before this returns.
        """
        state = self._state if self._begins_at_state else None
        self._state, self._begins_at_state = state, False
        is_within = skip > 0 or offset > 0
        if state is not None:
            # The seeds of the saved run, in case the script draws different ones this time.
            self.own_seeds = [*state.get("own_seeds", []), *[None] * len(self.own_seeds)][: len(self.own_seeds)]
        is_placed = state is not None and self._restore(state, is_within=is_within)
        loader, num_to_drop = (self.loader, 0) if is_placed else begin_at(self.loader, offset=offset, skip=skip)
        user_seeds = dict(zip(map(id, self._generators), self.own_seeds, strict=False))
        for generator in _generators_of(loader):
            user_seed = user_seeds.get(id(generator))
            seed_generator(generator, (self._seed if user_seed is None else user_seed) + epoch, user_seed=user_seed)
        for part in (loader, *samplers_of(loader), getattr(loader, "collate_fn", None)):
            tell_epoch(part, epoch)
        set_dataset_epoch(getattr(loader, "dataset", None), epoch=epoch, seed=self._seed)
        # A state leads to the position without an offset, which the length does not count.
        length_source = begin_at(loader, offset=offset)[0] if is_placed else loader
        self._current_pass = length_source, 0 if num_to_drop or loader is self.loader else skip
        self._stated_length = self._length()
        # A loader that begins elsewhere is a different object and does not change the state of this one.
        self._has_begun, self._is_open = True, loader is self.loader
        self._next_batch, self._rng_state = _END, None
        if is_placed or self._is_at_end:
            return self._keeping_state(self._resumed_batches(loader, may_start_over=not is_within))
        if _draws_here(self.loader, self._reader):
            # Ranks that cut their shares from one stream need the same numbers.
            is_shared = isinstance(self.loader, DispatchLoader) or is_cut(self._reader.dataset)
            seed = derive_seed(self._seed, epoch) if is_shared else None
            iterator = with_own_numbers(lambda: iter(loader), seed=seed)
        elif _may_draw_later(self.loader):
            iterator = with_own_numbers_later(iter(loader))
        else:
            iterator = iter(loader)
        for sampler in samplers_of(loader) if skip else ():
            if isinstance(sampler, Later):
                # Now, while the random state from which the epoch's order was drawn is restored.
                sampler.start()
        if num_to_drop:
            _logger.info("Reading and dropping %d batches that were trained on before the checkpoint.", num_to_drop)
        for _, _batch in zip(range(num_to_drop), iterator, strict=False):
            pass
        saved_entries = {} if state is None or not is_within else state
        iterator = iterator if is_within else noticing_copies(self._reader, iterator)
        batches = iterator
        if self._expects_save is not None:
            batches = self._one_ahead(iterator, saved_entries, self._expects_save)
        return batches if state is None else self._keeping_state(batches)

    def _keeping_state(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Keep the loaded state until a batch is read: a save before that stores it again."""
        for batch in batches:
            self._state = None
            yield batch
        self._state = None

    def _one_ahead(
        self, batches: Iterator[Any], saved_entries: Mapping[str, Any], expects_save: Callable[[], bool]
    ) -> Iterator[Any]:
        """Collate each batch before the one before it is trained on, like the documented Trainer's loader.

        Random numbers of the data and of the model (dropout) are then drawn in the same order. A planned checkpoint
        contains the numbers from which a resume collates the batch ahead again; to copy them at every batch takes
        longer than a small step, so another checkpoint contains the batch itself, if it is made of tensors.
        """
        if not saved_entries.keys() & {"numbers", "ahead"}:
            self._next_batch = next(batches, _END)
        else:
            with preserved_rng():
                if "numbers" in saved_entries:
                    restore_rng(saved_entries["numbers"])
                self._next_batch = next(batches, _END)
            saved_tensors = saved_entries.get("ahead", [])
            if len(tensors_of(self._next_batch)) == len(saved_tensors):
                saved_tensors = iter(saved_tensors)
                self._next_batch = map_tensors(self._next_batch, lambda tensor: next(saved_tensors).to(tensor.device))
            elif saved_tensors:
                _logger.warning("The checkpoint's next batch does not fit the data, so it is collated again.")
        devices, is_stored = rng_devices(), _is_made_of_tensors(self._next_batch)
        while self._next_batch is not _END:
            batch = self._next_batch
            self._rng_state = None if is_stored and not expects_save() else rng_now(devices)
            self._next_batch = next(batches, _END)
            yield batch

    def _restore(self, state: dict[str, Any], *, is_within: bool) -> bool:
        """Restore states; return whether that restores the position in the data as well."""
        reader = self._reader
        # The position of a dataset is a sample, independent of batches.
        settings = {name: getattr(reader, name, None) for name in (_SETTINGS if "loader" in state else _SETTINGS[:1])}
        differences = [
            f"{name} was {state.get(name)!r}, now {value!r}"
            for name, value in settings.items()
            if state.get(name) != value
        ]
        if differences and is_within and (self.is_stream or "loader" in state):
            _logger.warning("The data cannot go on exactly where it was: %s.", ", ".join(differences))
            return False
        if is_within and "loader" in state and not isinstance(reader, StatefulLoader) and state["num_workers"]:
            _logger.warning(
                "%s continues from its own state, which does not include the random numbers of its workers.",
                type(reader).__name__,
            )
        # A torch loader restarts each epoch; its state is a position within an epoch.
        if "loader" in state and has_state(reader) and (is_within or not isinstance(reader, DataLoader)):
            reader.load_state_dict(state["loader"])
            return True
        if "dataset" in state and _is_read_here(reader) and has_state(reader.dataset):
            undo = load_state(reader.dataset, state["dataset"])
            # A run that goes back to an earlier step ends where it has read to.
            if not self._has_begun:
                self._undo_load = undo
            return self.is_stream
        return False

    def _resumed_batches(self, loader: Any, *, may_start_over: bool) -> Iterator[Any]:
        """Iterate data whose restored state may be at the end of the data.

        If so, this epoch is over. The next one starts at the beginning with a new iterator of data and wrapper.
        """
        iterator = iter(loader)

        def batches() -> Iterator[Any]:
            self._is_at_end = True
            for attempt in (iterator, loader, loader):
                for batch in attempt:
                    self._is_at_end = False
                    yield batch
                if not self._is_at_end or not may_start_over:
                    return

        return batches()


def _is_random_access(loader: Any) -> bool:
    """Return whether this process reads map-style data without a state with a loader of hftrain's."""
    is_stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    is_own = isinstance(loader, RankLoader) and not is_stream
    return is_own and _is_read_here(loader) and not has_state(loader.dataset)


def _is_read_here(reader: Any) -> bool:
    return getattr(reader, "dataset", None) is not None and not getattr(reader, "num_workers", 0)


def _draws_here(loader: Any, reader: Any) -> bool:
    """Return whether this process reads a stream that must be read again up to its position after a resume."""
    if isinstance(loader, DispatchLoader) and loader.rank > 0:
        return False
    is_stream = isinstance(getattr(reader, "dataset", None), IterableDataset)
    return is_stream and _is_read_here(reader) and not has_state(reader) and not has_state(reader.dataset)


def _may_draw_later(loader: Any) -> bool:
    """Return whether a user's own iterable may draw numbers in the middle of a pass, unlike a loader of torch's."""
    loader = getattr(loader, "base_dataloader", loader)
    is_known = is_plain_loader(loader) or isinstance(loader, (DispatchLoader, Sequence))
    return not is_known and not has_state(loader)


def _is_made_of_tensors(batch: Any) -> bool:
    """Return whether a batch holds plain tensors only, in mappings, lists and tuples."""
    if isinstance(batch, Mapping):
        return all(map(_is_made_of_tensors, batch.values()))
    if isinstance(batch, (list, tuple)):
        return all(map(_is_made_of_tensors, batch))
    return type(batch) is torch.Tensor and batch.layout == torch.strided


def _generators_of(loader: Any) -> list[torch.Generator]:
    """List the generators of a loader and its samplers, each once."""
    generators = [getattr(part, "generator", None) for part in (loader, *samplers_of(loader))]
    return list({id(each): each for each in generators if isinstance(each, torch.Generator)}.values())
