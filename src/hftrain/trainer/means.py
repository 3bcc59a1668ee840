"""The search for what a model's own loss is a mean over, on the bare model and without a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from hftrain.core.log import get_logger
from hftrain.core.seed import preserved_rng
from hftrain.task.items import KINDS, SAMPLES, SUM, MeanOver, Pair, find_mean, pick_pair
from hftrain.task.loss import read_loss
from hftrain.task.model_task import ModelTask
from hftrain.trainer.evaluating import cast_inputs
from hftrain.trainer.rehearsal import kept_values

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

logger = get_logger(__name__)


class MeanSearch:
    """Look for a batch that tells what the model's own loss is a mean over, until one does.

    Two samples with unequal numbers of labels are enough: which weights of their losses give the loss of both? The
    model itself is called, without gradients and in evaluation mode, and no function or hook of the Trainer's.
    Random numbers, buffers, modes and plain attributes of the modules stay as they were.

    Args:
        trainer: Whose model is tried; what is found goes into its task.
    """

    def __init__(self, trainer: Trainer) -> None:
        task = trainer.task
        self.trainer = trainer
        self.task = task if isinstance(task, ModelTask) else None
        # Of a batch that an override makes for the model nothing is known.
        makes_inputs = any(map(trainer._is_overridden, ("_prepare_inputs", "_prepare_input")))
        self._is_open = self.task is not None and self.task.returns_loss and not makes_inputs
        self._num_looks = 0
        self._found: MeanOver | None = None

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
        # To agree takes an exchange, and to read what lies on a device waits for it: ever more rarely.
        if (is_shared or not _is_readable(task, batches)) and self._num_looks & (self._num_looks - 1):
            return
        is_new = task.mean_over is None
        pairs = (self._pair(batch, even=False) for batch in batches)
        pair = next((each for each in pairs if each is not None), None)
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
            task.mean_over = MeanOver(task.rule, is_final=False)

    def look_at(self, batch: Any) -> None:
        """Find out from an evaluation's batch, for `agree` at its end."""
        if self._found is None and not self.is_over:
            pair = self._pair(batch, even=False)
            found = None if pair is None else self._try(pair)
            self._found = found if found is None or found.is_final else None

    def agree(self) -> str:
        """Return what the loss is a mean over, the same in every process; collective until known."""
        task, strategy = self.task, self.trainer.strategy
        assert task is not None
        if len(task.kinds) > 1:
            code = -1 if self._found is None else self._found.code()
            code = int(strategy.reduce(torch.tensor(code, device=strategy.device), op="max"))
            if code >= 0:
                self._settle(MeanOver.from_code(code))
        self._found = None
        return task.kinds[0]

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

    def _pair(self, batch: Any, *, even: bool) -> Pair | None:
        """Return samples to compare, on the host or wherever they are."""
        task = self.task
        assert task is not None
        if not isinstance(batch, dict) and not hasattr(batch, "keys"):
            return None
        labels, key = task.label_tensor(batch), task.label_key(batch)
        if key is not None and isinstance(batch[key], torch.Tensor) and (labels is None or labels.dim() < 2):
            # One label a sample: whatever the loss, it is a mean over samples, or over the labels that count.
            return pick_pair(batch, None, (), even=True) if even else None
        return pick_pair(batch, labels, task.ignored_labels, even=even)

    def _try(self, pair: Pair) -> MeanOver:
        """Compare the losses; what cannot be computed here settles that the documented rule is taken."""
        trainer, task = self.trainer, self.task
        assert task is not None
        strategy = trainer.strategy
        has_labels = task.label_tensor(pair.one) is not None
        kinds = [task.rule, *(kind for kind in KINDS if kind not in (task.rule, SUM))] if has_labels else [SAMPLES]
        kinds = kinds[1:] if kinds[0] == SUM else kinds
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
            with _without_trace(trainer, model):
                return find_mean(
                    pair,
                    loss_of,
                    rule=task.rule,
                    kinds=kinds,
                    count=lambda kind, batch: int(task.count_as(kind, batch)),
                    takes_count=task.accepts_item_count,
                    is_rough=is_rough,
                )
        except Exception as error:
            logger.debug("What the loss is a mean over could not be tried: %r", error)
            return MeanOver(task.rule)


def _is_readable(task: ModelTask, batches: Sequence[Any]) -> bool:
    """Tell whether reading the labels waits for no device."""
    labels = [task.label_tensor(batch) for batch in batches]
    return all(each is None or each.device.type == "cpu" for each in labels)


@contextmanager
def _without_trace(trainer: Trainer, model: torch.nn.Module) -> Iterator[None]:
    """Call a model in evaluation mode, as it is written, and put everything back that this changes."""
    modules = list(model.modules())
    modes = [(module, module.training) for module in modules]
    buffers = [(module._buffers, dict(module._buffers)) for module in modules]
    contents = [(buffer, buffer.clone()) for buffer in model.buffers()]
    # An engine that splits the model keeps notes of its own in the modules.
    is_split = trainer.strategy.shards_model or trainer.is_deepspeed_enabled or trainer.is_tp_enabled
    values = [] if is_split else [(vars(module), kept_values(vars(module))) for module in modules]
    compiled: list[tuple[Any, Callable[..., Any]]] = []
    for module in modules:
        if module._compiled_call_impl is not None:
            compiled.append((module, module._compiled_call_impl))
            module._compiled_call_impl = None
    try:
        with preserved_rng(), torch.no_grad():
            for module in modules:
                module.training = False
            yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call
        for own, kept in values:
            for name in own.keys() - kept.keys():
                del own[name]
            own.update({name: value for name, value in kept.items() if own.get(name) is not value})
        for own, kept in buffers:
            own.update(kept)
        with torch.no_grad():
            for buffer, value in contents:
                buffer.copy_(value)
        for module, was_training in modes:
            module.training = was_training
