"""The search for what a model's own loss is a mean over, on the bare model and without a trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hftrain.core.log import get_logger
from hftrain.core.seed import preserved_rng
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
)
from hftrain.task.loss import read_loss
from hftrain.task.model_task import ModelTask
from hftrain.trainer.evaluating import cast_inputs

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)

_INTERNAL = frozenset(vars(torch.nn.Module()))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_LIBRARIES = frozenset(
    {"accelerate", "bitsandbytes", "deepspeed", "hftrain", "peft", "torch", "torchao", "transformers"}
)


class MeanSearch:
    """Look for a batch that tells what the model's own loss is a mean over, until one does.

    Two samples with unequal numbers of labels are enough: which weights of their losses give the loss of both? The
    model itself is called, without gradients and in evaluation mode, and no function or hook of the Trainer's.
    Random numbers, buffers, modes and the modules' own attributes stay as they were, containers with what they held.

    Args:
        trainer: Whose model is tried; what is found goes into its task.

    Attributes:
        found: What this process alone has found in an evaluation.
    """

    def __init__(self, trainer: Trainer) -> None:
        task = trainer.task
        self.trainer = trainer
        self.task = task if isinstance(task, ModelTask) else None
        # Of a batch that an override makes for the model nothing is known.
        makes_inputs = any(map(trainer._is_overridden, ("_prepare_inputs", "_prepare_input")))
        self._is_open = self.task is not None and self.task.returns_loss and not makes_inputs
        self._num_looks = self._num_tries = 0
        self._fits: tuple[str, ...] = ()
        self._before: Any = None
        self.found: MeanOver | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to be found."""
        task = self.task
        found = None if task is None else task.mean_over
        return (
            not self._is_open or task is None or task.count_rule is not None or (found is not None and found.is_final)
        )

    def look(self, batches: Sequence[Any]) -> None:
        """Find out from a step's batches, if they tell, and write it into the task; collective until known."""
        task, strategy = self.task, self.trainer.strategy
        if self.is_over or task is None:
            return
        self._num_looks += 1
        is_shared = strategy.world_size > 1
        # To agree takes an exchange, to read what lies on a device waits for it, and to try again takes losses: ever
        # more rarely.
        is_costly = is_shared or self._num_tries or not _is_readable(task, batches)
        if self._num_looks & (self._num_looks - 1) and is_costly:
            return
        is_new = task.mean_over is None
        pairs = (self._pair(batch, even=False) for batch in batches)
        pair = next((each for each in pairs if each is not None), None) or self._joined_pair(batches)
        # A loss that takes a count tells on any batch.
        can_tell = pair is not None or (is_new and task.accepts_item_count)
        if not strategy.all_true(not can_tell):
            pair = pair or self._pair(batches[0], even=True) or Pair(batches[0])
            found = self._try(pair.filled() if is_shared else pair)
            if is_shared:
                code = torch.tensor(found.code(), device=strategy.device)
                found = MeanOver.from_code(int(strategy.reduce(code, op="max")))
            if found.is_final or is_new:
                self._settle(found)
        if task.mean_over is None:
            task.mean_over = MeanOver(self._likeliest, is_final=False)

    def look_at(self, batch: Any) -> None:
        """Find out from an evaluation's batch, for `agree` at its end."""
        task = self.task
        if task is None or self.is_over or (self.found is not None and self.found.is_final):
            return
        if task.labels_of(batch) is None and not task.can_return_loss:
            return
        # A loss that takes a count tells on any batch.
        before, self._before = self._before, batch
        pair = self._pair(batch, even=task.accepts_item_count and self.found is None)
        pair = pair or (None if before is None else self._joined_pair([before, batch]))
        if pair is not None:
            self.found = self._try(pair)

    def agree(self) -> str:
        """Return what the loss is a mean over, the same in every process; collective until known."""
        task, strategy = self.task, self.trainer.strategy
        assert task is not None
        self._before = None
        if len(task.kinds) > 1:
            own = self.found or MeanOver(self._likeliest, is_final=False)
            found = MeanOver.from_code(int(strategy.reduce(torch.tensor(own.code(), device=strategy.device), op="max")))
            self.found = None
            if not found.is_final:
                return found.kind
            self._settle(found)
        self.found = None
        return task.kinds[0]

    @property
    def _likeliest(self) -> str:
        assert self.task is not None
        return self._fits[0] if self._fits else self.task.rule

    def _kinds(self) -> list[str]:
        """Return what the loss may be a mean over, by what was tried so far; the likeliest first."""
        assert self.task is not None
        rule = self.task.rule
        known = [rule, *(kind for kind in KINDS if kind != rule)]
        return list(self._fits) or [kind for kind in known if kind != SUM]

    def _settle(self, found: MeanOver) -> None:
        task = self.task
        assert task is not None
        task.mean_over = found
        if not found.is_exact and self.trainer.strategy.is_main:
            logger.warning(
                "The loss of %s is not the mean over samples or labels: a contrastive or weighted loss, say. Batches "
                "are weighed by their %s, so eval_loss, and the gradients of accumulated or shared batches, depend on "
                "the batch size. Pass count_items= to the Trainer to choose the weights; this is not said then.",
                type(task.model).__name__,
                found.kind.replace("_", " "),
            )

    def _joined_pair(self, batches: Sequence[Any]) -> Pair | None:
        """Return samples to compare out of several batches, of one sample each, say."""
        task = self.task
        assert task is not None
        if len(batches) < 2 or not isinstance(batches[0], Mapping) or task.num_samples(batches[0]) > 1:
            return None
        joined = join_batches(batches)
        return None if joined is None else self._pair(joined, even=False)

    def _pair(self, batch: Any, *, even: bool) -> Pair | None:
        """Return samples to compare, on the host or wherever they are."""
        task = self.task
        assert task is not None
        if not isinstance(batch, dict) and not hasattr(batch, "keys"):
            return None
        labels, key = task.label_tensor(batch), task.label_key(batch)
        if key is not None and isinstance(batch[key], torch.Tensor) and (labels is None or labels.dim() < 2):
            # One label a sample: whatever the loss, it is a mean over samples, or over the labels that count.
            return pick_pair(batch, None, even=True) if even else None
        if labels is None:
            return pick_pair(batch, None, even=even)
        marks = counted(labels, task.ignored_labels)
        items = {
            LABELS: marks,
            SHIFTED: marks if batch.get("shift_labels") is not None else marks[..., 1:],
            SAMPLES: torch.ones_like(marks[..., :1]).flatten(1)[:, :1],
        }
        counts = {kind: items[kind].flatten(1).sum(1).tolist() for kind in self._kinds()}
        return pick_pair(batch, counts, even=even)

    def _try(self, pair: Pair) -> MeanOver:
        """Compare the losses; what cannot be computed here settles that the documented rule is taken."""
        trainer, task = self.trainer, self.task
        assert task is not None
        strategy = trainer.strategy
        has_labels = task.label_tensor(pair.one) is not None
        kinds = self._kinds() if has_labels else [SAMPLES]
        model = task.model if strategy.shards_model else trainer.model
        is_rough = trainer.precision.policy.compute_dtype.itemsize < 4 or any(
            p.is_floating_point() and p.element_size() < 4 for p in model.parameters()
        )

        def loss_of(batch: Any, count: int | None) -> float:
            inputs = strategy.to_device(batch)
            if trainer._input_dtype is not None:
                inputs = cast_inputs(inputs, trainer._input_dtype, labels=task.label_names)
            with trainer._autocast():
                outputs = task._call(
                    model, inputs, None if count is None else torch.tensor(count, device=strategy.device)
                )
            return float(read_loss(outputs, model_name=type(task.model).__name__))

        try:
            self._num_tries += 1
            with _without_trace(trainer, model):
                found = find_mean(
                    pair,
                    loss_of,
                    rule=task.rule,
                    kinds=kinds,
                    count=lambda kind, batch: int(task.count_as(kind, batch)),
                    takes_count=task.accepts_item_count,
                    is_rough=is_rough,
                )
            self._fits = found.fits or self._fits
            return found
        except Exception as error:
            logger.debug("What the loss is a mean over could not be tried: %r", error)
            return MeanOver(task.rule)


def _is_readable(task: ModelTask, batches: Sequence[Any]) -> bool:
    """Tell whether reading the labels waits for no device."""
    labels = [task.label_tensor(batch) for batch in batches]
    return all(each is None or each.device.type == "cpu" for each in labels)


def _is_users(hook: Any) -> bool:
    """Tell whether a forward hook is written by a user, and so not called but for the run's own batches."""
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] not in _LIBRARIES


@contextmanager
def _without_trace(trainer: Trainer, model: torch.nn.Module) -> Iterator[None]:
    """Call a model in evaluation mode, as it is written, and put everything back that this changes."""
    modules = list(model.modules())
    # An engine that splits the model keeps notes of its own in the modules.
    is_split = trainer.strategy.shards_model or trainer.is_deepspeed_enabled or trainer.is_tp_enabled
    kept = [_Kept(module, is_whole=not is_split) for module in modules]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        with preserved_rng(), torch.no_grad():
            for module in modules:
                module.training, module._compiled_call_impl = False, None
            yield
    finally:
        for each in kept:
            each.restore()
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


class _Kept:
    """What the call of a module may change of it, and what is changed to call it.

    Args:
        module: Its user's forward hooks are taken away.
        is_whole: Keep its own attributes too, and what lists, dicts and sets in them hold, nested ones too.
    """

    def __init__(self, module: torch.nn.Module, *, is_whole: bool) -> None:
        self._own = own = vars(module)
        self._training, self._call, self._buffers = module.training, module._compiled_call_impl, dict(module._buffers)
        # Empty ones too: transformers' models add hooks in their first call, and note that they have.
        self._hooks = {name: own[name] for name in _HOOKS if is_whole}
        self._attributes: dict[str, tuple[Any, list[tuple[Any, Any]]]] | None = None
        if is_whole:
            values = {name: value for name, value in own.items() if name not in _INTERNAL}
            self._attributes = {name: (value, list(_contents(value))) for name, value in values.items()}
        for name, hooks in self._hooks.items():
            own[name] = OrderedDict((key, hook) for key, hook in hooks.items() if not _is_users(hook))

    def restore(self) -> None:
        """Put everything back."""
        own = self._own
        own.update(self._hooks, training=self._training, _compiled_call_impl=self._call)
        own["_buffers"].update(self._buffers)
        if self._attributes is None:
            return
        for name in own.keys() - self._attributes.keys() - _INTERNAL:
            del own[name]
        for name, (value, contents) in self._attributes.items():
            own[name] = value
            for container, content in contents:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(content)


def _contents(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield the plain containers in a value, itself included, each with a copy of what it holds."""
    if type(value) in (list, dict, set) and depth < 8:
        yield value, value.copy()
        for each in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _contents(each, depth + 1)
