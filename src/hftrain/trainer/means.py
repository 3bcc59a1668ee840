"""Detection of the items that a model's own loss averages over, on the bare model and without side effects."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from hftrain.core.log import get_logger
from hftrain.core.types import PrecisionPolicy
from hftrain.evaluation.ready import cast_inputs
from hftrain.step.computing import Computing
from hftrain.strategies.base import Strategy
from hftrain.strategies.lockstep import can_lend, lend
from hftrain.task.items import (
    KINDS,
    LABELS,
    SAMPLES,
    SHIFTED,
    SUM,
    MeanOver,
    Pair,
    counted,
    find_mean,
    join_batches,
    pick_pair,
    pick_rows,
    take_samples,
)
from hftrain.task.loss import read_loss
from hftrain.task.model_task import ModelTask, call_model
from hftrain.trainer.traceless import without_trace

logger = get_logger(__name__)

_MAX_PAIRS = 4  # kept during an evaluation and tried at its end
_COUNTED = (LABELS, SHIFTED, SAMPLES)
_FAR = 2**62


class MeanSearch:
    """Search batches for one that shows what the model's own loss averages over.

    Two samples with unequal numbers of labels are enough: the weights with which their losses give the loss of both
    identify the kind. Only the model is called, without gradients and in evaluation mode; functions and hooks of the
    Trainer are not. Random numbers, buffers, modes and the modules' attributes, with their contents, are restored.

    The first process with a suitable batch tries it and sends its answer to all. If a model is split over processes,
    all try the same samples, so an error occurs in all of them at the same place.

    Args:
        is_split: Whether processes hold parts of the model.
        makes_inputs: Whether an override prepares the model's inputs, which are then unknown.

    Attributes:
        found: The kind that this process alone has detected in an evaluation.
    """

    def __init__(
        self,
        task: ModelTask | None,
        strategy: Strategy,
        policy: PrecisionPolicy,
        computing: Computing,
        *,
        is_split: bool,
        makes_inputs: bool,
    ) -> None:
        self._task, self._strategy, self._policy, self._computing = task, strategy, policy, computing
        # A forward pass is then collective.
        self._is_split = is_split and strategy.world_size > 1
        self._is_whole = not is_split
        self.is_open = task is not None and task.is_searched and not makes_inputs
        self._num_looks = self._num_tries = 0
        self._fits: tuple[str, ...] = ()
        self._pairs: list[Pair] = []
        self._before: Any = None
        self._even: Pair | None = None
        self.found: MeanOver | None = None

    @property
    def task(self) -> ModelTask:
        """The plain model's task, which exists whenever the search is open."""
        assert self._task is not None
        return self._task

    def look(self, batches: Sequence[Any]) -> None:
        """Try a step's batches and store a result in the task; collective while the search is open."""
        task, strategy = self.task, self._strategy
        self._num_looks += 1
        # Communication and reads wait for a device, and each try takes forward passes: do it ever more rarely.
        is_shared = strategy.world_size > 1 and strategy.device.type != "cpu"
        is_costly = is_shared or self._num_tries or not _is_readable(task, batches)
        if self._num_looks & (self._num_looks - 1) and is_costly:
            return
        is_new = task.mean_over is None
        is_over = all(map(self._has_one_label, batches))
        pairs = (self._pair(batch, even=False) for batch in batches)
        pair = next((each for each in pairs if each is not None), None) or self._joined_pair(batches)
        # For a loss that takes a count, any batch is enough.
        can_tell = pair is not None or (is_new and task.accepts_item_count)
        if pair is None and (can_tell or not is_over):
            pair = self._pair(batches[0], even=True) or Pair(batches[0], is_ragged=False)
        found = self._share(pair, can_tell=can_tell, is_over=is_over)
        if found is not None and (found.is_final or is_new):
            self._settle(found)
        if task.mean_over is None:
            task.mean_over = MeanOver(self._likeliest, is_final=not self.is_open)

    def look_at(self, batch: Any) -> None:
        """Keep samples of an evaluation batch that may show the kind, for `agree` at the end."""
        if not self.is_open or (self.task.labels_of(batch) is None and not self.task.can_return_loss):
            return
        task = self.task
        if task.accepts_item_count and self.found is None and task.mean_over is None:
            # Tried at once, because the loss may need the count; any batch is enough for such a loss. If the model is
            # split over processes, the whole batch is used, so that all compute the same.
            pair = None if self._is_split else self._pair(batch, even=True)
            found = self._try(pair or Pair(batch, is_ragged=False))
            if isinstance(found, list):
                self._say_why(*found)
                found = MeanOver(self._likeliest, is_final=False)
            self.found = found
        before, self._before = self._before, batch
        if len(self._pairs) < _MAX_PAIRS:
            pair = self._pair(batch, even=False) or (None if before is None else self._joined_pair([before, batch]))
            self._pairs += [] if pair is None else [pair]
        if self._even is None and not self._has_one_label(batch):
            self._even = self._pair(batch, even=True)

    def agree(self) -> str:
        """Return the kind that the loss averages over, the same in every process; collective while open."""
        task = self.task
        found = self._share(self.found) if self.is_open else None
        for index in range(_MAX_PAIRS):
            if self.is_open and (found is None or not found.is_final):
                can_tell = index < len(self._pairs)
                found = self._share(self._pairs[index] if can_tell else self._even, can_tell=can_tell)
        if found is not None and found.is_final:
            self._settle(found)
        self.found = self._before = self._even = None
        self._pairs.clear()
        if not task.is_searched:
            return task.kinds[0]
        return self._likeliest if task.mean_over is None else task.kind

    @property
    def _likeliest(self) -> str:
        return self._fits[0] if self._fits else self.task.rule

    def _kinds(self) -> list[str]:
        """Return the kinds that the batches tried so far leave possible, the likeliest first."""
        rule = self.task.rule
        known = [rule, *(kind for kind in KINDS if kind != rule)]
        return list(self._fits) or [kind for kind in known if kind != SUM]

    def _share(
        self, own: Pair | MeanOver | None, *, can_tell: bool = True, is_over: bool = False, is_joined: bool = False
    ) -> MeanOver | None:
        """Return the result of the process that knows most, or that it gets with its samples. Collective.

        Args:
            can_tell: Whether `own` is worth trying; otherwise it only serves other processes for comparison.
            is_over: No further batch can help this process; if that holds for all processes, the search ends.
            is_joined: Whether `own` was compared with the samples of other processes.
        """
        strategy, is_split = self._strategy, self._is_split
        if is_split and isinstance(own, Pair):
            own = Pair(**strategy.to_device(own.parts())) if can_lend(own.parts()) else None
        weight = 0 if own is None or not can_tell else 2 if isinstance(own, Pair) else 3 if own.is_final else 1
        size = strategy.world_size
        rows = self._rows(own) if size > 1 and isinstance(own, Pair) and not is_joined else []
        # The largest and the smallest count show whether all comparable samples hold equally many items.
        ends = [(max(each), -min(each)) for each in zip(*rows, strict=True)] or [(-_FAR, -_FAR)] * len(_COUNTED)
        codes = [weight * size + size - 1 - strategy.rank, not is_over, *sum(ends, ())]
        best, is_open, *spread = strategy.reduce(torch.tensor(codes, device=strategy.device), op="max").tolist()
        if any(most + least > 0 for most, least in zip(spread[::2], spread[1::2], strict=True)):
            return self._share(self._across(own, rows), is_joined=True)
        weight, source = best // size, size - 1 - best % size
        if not weight:
            self.is_open = bool(is_open)
            return None
        answer: Any = own
        if weight == 2:
            self._num_tries += 1
            pair = own if isinstance(own, Pair) else None
            if is_split:
                pair = Pair(**lend(strategy, pair and pair.parts(), src=source))
            if pair is not None and (is_split or strategy.rank == source):
                answer = self._try(pair)
        if size > 1:
            answer = strategy.broadcast_object(asdict(answer) if isinstance(answer, MeanOver) else answer, source)
        if isinstance(answer, list):
            self._say_why(*answer)
            return None
        found = answer if isinstance(answer, MeanOver) else MeanOver(**{**answer, "fits": tuple(answer["fits"])})
        self._fits = found.fits or self._fits
        return found

    def _rows(self, pair: Pair) -> list[tuple[int, ...]]:
        """Return the item counts of the samples that other processes may compare with theirs."""
        task = self.task
        samples = [each for each in (pair.one, pair.other) if each is not None]
        if any(task.label_tensor(each) is None or task.num_samples(each) > 1 or not can_lend(each) for each in samples):
            return []
        return [tuple(int(task.count_as(kind, each)) for kind in _COUNTED) for each in samples]

    def _across(self, own: Pair | MeanOver | None, rows: list[tuple[int, ...]]) -> Pair | MeanOver | None:
        """Return the two best samples of all processes: in the process that holds both, or else in all."""
        strategy, kinds = self._strategy, self._kinds()
        places, offered = [], []
        for rank, theirs in enumerate(strategy.gather_object(rows)):
            for index, counts in enumerate(theirs):
                places.append((rank, index))
                offered.append(tuple(number for kind, number in zip(_COUNTED, counts, strict=True) if kind in kinds))
        one, other, is_telling = pick_rows(offered)
        if not is_telling:
            return own if isinstance(own, MeanOver) or (own is not None and own.is_ragged) else None
        if places[one][0] == places[other][0]:
            return own if places[one][0] == strategy.rank else None
        mine = [] if not isinstance(own, Pair) else [strategy.to_device(each) for each in (own.one, own.other)]
        lent = [
            lend(strategy, mine[index] if rank == strategy.rank else None, src=rank)
            for rank, index in (places[one], places[other])
        ]
        joined = join_batches(lent)
        if joined is not None:
            return self._pair(joined, even=False)
        return own if isinstance(own, Pair) and own.other is not None else Pair(lent[0])

    def _settle(self, found: MeanOver) -> None:
        task = self.task
        task.mean_over = found
        self.is_open = not found.is_final
        if not found.is_exact and self._strategy.is_main:
            logger.warning(
                "The loss of %s is not the mean over samples or labels: a contrastive or weighted loss, say. Batches "
                "are weighed by their %s, so eval_loss, and the gradients of accumulated or shared batches, depend on "
                "the batch size. Pass count_items= to the Trainer to choose the weights and silence this warning.",
                type(task.model).__name__,
                found.kind.replace("_", " "),
            )

    def _say_why(self, reason: str, is_ragged: bool) -> None:
        """Log once that the detection failed, and a second time once it affects results."""
        task, level = self.task, logging.WARNING if is_ragged else logging.INFO
        if level <= task.level_told or not self._strategy.is_main:
            return
        task.level_told = level
        logger.log(
            level,
            "Cannot determine what the loss of %s is a mean over: %s. It is assumed to be the mean over %s%s. Pass "
            "count_items= to the Trainer to choose another.",
            type(task.model).__name__,
            reason,
            self._likeliest.replace("_", " "),
            ", and the samples hold unequal numbers of them, so gradients and eval_loss depend on it" * is_ragged,
        )

    def _joined_pair(self, batches: Sequence[Any]) -> Pair | None:
        """Return samples to compare from several batches whose own samples hold equal counts."""
        task = self.task
        if len(batches) < 2 or any(task.label_tensor(each) is None or self._has_one_label(each) for each in batches):
            return None
        firsts = [take_samples(batch, [0], task.num_samples(batch)) for batch in batches]
        joined = None if any(first is None for first in firsts) else join_batches(firsts)
        if joined is not None:
            return self._pair(joined, even=False)
        counts = {tuple(self._counts(batch)[kind][0] for kind in self._kinds()) for batch in batches}
        return Pair(batches[0]) if len(counts) > 1 else None

    def _has_one_label(self, batch: Any) -> bool:
        """Return whether each sample has one label, so that every loss is a mean over the labels that count."""
        task = self.task
        key, labels = task.label_key(batch), task.label_tensor(batch)
        return key is not None and isinstance(batch[key], torch.Tensor) and (labels is None or labels.dim() < 2)

    def _counts(self, batch: Any) -> dict[str, list[int]]:
        """Return the number of items of each kind in each sample of a batch with labels."""
        task = self.task
        labels = task.label_tensor(batch)
        assert labels is not None
        marks = counted(labels, task.ignored_labels)
        items = {
            LABELS: marks,
            SHIFTED: marks if batch.get("shift_labels") is not None else marks[..., 1:],
            SAMPLES: torch.ones_like(marks[..., :1]).flatten(1)[:, :1],
        }
        return {kind: items[kind].flatten(1).sum(1).tolist() for kind in self._kinds()}

    def _pair(self, batch: Any, *, even: bool) -> Pair | None:
        """Return samples of a batch to compare, on their current device."""
        task = self.task
        if not isinstance(batch, dict) and not hasattr(batch, "keys"):
            return None
        if self._has_one_label(batch):
            return pick_pair(batch, None, even=True) if even else None
        counts = None if task.label_tensor(batch) is None else self._counts(batch)
        return pick_pair(batch, counts, even=even)

    def _try(self, pair: Pair) -> MeanOver | list[Any]:
        """Compare the losses; if they cannot be computed, return the reason and whether the samples are ragged."""
        task, strategy = self.task, self._strategy
        if pair.is_ragged and pair.other is None and not task.accepts_item_count:
            return ["its batches cannot be cut into samples, or joined", True]
        has_labels = task.label_tensor(pair.one) is not None
        kinds = self._kinds() if has_labels else [SAMPLES]
        model = task.model if strategy.shards_model else strategy.unwrap(task.model)
        is_rough = self._policy.compute_dtype.itemsize < 4 or any(
            p.is_floating_point() and p.element_size() < 4 for p in model.parameters()
        )

        def loss_of(batch: Any, count: int | None) -> float:
            inputs = strategy.to_device(batch)
            dtype = self._computing.input_dtype
            if dtype is not None:
                inputs = cast_inputs(inputs, dtype, labels=task.label_names)
            with self._computing.autocast():
                items = None if count is None else torch.tensor(count, device=strategy.device)
                outputs = call_model(model, inputs, items)
            return float(read_loss(outputs, model_name=type(task.model).__name__))

        try:
            with without_trace(model, is_whole=self._is_whole):
                found = find_mean(
                    pair,
                    loss_of,
                    rule=task.rule,
                    kinds=kinds,
                    count=lambda kind, batch: int(task.count_as(kind, batch)),
                    takes_count=task.accepts_item_count,
                    is_rough=is_rough,
                )
        except Exception as error:
            return [f"{type(error).__name__}: {error}".strip().rstrip("."), pair.is_ragged]
        if pair.is_ragged and pair.other is None and not (found.is_final or found.fits):
            return ["its batches cannot be cut into samples, or joined", True]
        return found


def _is_readable(task: ModelTask, batches: Sequence[Any]) -> bool:
    """Return whether the labels can be read without waiting for a device."""
    labels = [task.label_tensor(batch) for batch in batches]
    return all(each is None or each.device.type == "cpu" for each in labels)
