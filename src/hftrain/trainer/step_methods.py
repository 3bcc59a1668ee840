"""Trainer methods of one training step: inputs, loss, loss weighting and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from typing import Any, ClassVar

import torch
from torch import nn

from hftrain.core.accelerate_state import tell_accelerate_sync
from hftrain.core.errors import TaskError
from hftrain.core.log import get_logger
from hftrain.core.notes import keep_facts
from hftrain.core.signatures import accepts
from hftrain.core.tree import map_tensors
from hftrain.core.types import Owns
from hftrain.evaluation.generating import align_special_tokens
from hftrain.evaluation.ready import cast_inputs
from hftrain.evaluation.recurrence import read_memory, with_memory
from hftrain.run.setup import place_task
from hftrain.task.model_call import ModelCall
from hftrain.task.model_task import ModelTask
from hftrain.task.modes import is_on
from hftrain.task.module import as_step_output
from hftrain.task.noise import add_noise, find_embeddings
from hftrain.trainer.loss_finding import LossHooks
from hftrain.trainer.optimizer_methods import OptimizerMethods
from hftrain.trainer.weighing import LossShares

logger = get_logger(__name__)


class StepMethods(OptimizerMethods):
    """Run a training step."""

    def _nested_gather(self, tensors: Any, name: str | None = None) -> Any:
        """Concatenate the tensors of all processes, nesting kept; also used to average the logged loss. Collective."""
        return map_tensors(tensors, self.strategy.gather)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the module whose forward is called: wrapped for training, bare for evaluation. Collective.

        For training the strategy wraps the model, and the optimizer is created inside. An override may put a wrapper
        around the result only if the strategy can unwrap it (DDP, DataParallel, torch.compile).
        """
        if training and self._strategy_wrap is not None:
            return self._strategy_wrap(model)
        return self.strategy.for_evaluation(model)

    def _prepare_context_parallel_inputs(
        self, model: nn.Module, inputs: Any
    ) -> tuple[Callable[[], AbstractContextManager[Any]], Any]:
        """Return a factory of the context to train a micro-batch in, and the micro-batch; called before training it."""
        return nullcontext, inputs

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: int | torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run forward and backward on one micro-batch.

        Args:
            model: The wrapped model.
            inputs: The micro-batch.
            num_items_in_batch: Items of the whole step; None if not needed.

        Returns:
            The detached loss, scaled to its share of the step.

        Source: the documented `Trainer.training_step`.
        """
        mode = self._training_mode
        if mode is None:
            model.train()
        elif model is not mode.model or not all(map(is_on, mode.flags)):
            mode.enter(model)
        if mode is not None and mode.train_weights is not None:
            mode.train_weights()
        shares = self._shares if self._shares.is_on else None
        # The share of the batch as it was counted: overrides may return another batch or pop its labels.
        share = None if shares is None else shares.share_of(inputs)
        if shares is not None:
            shares.open(inputs)
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss: torch.Tensor = self._slot_compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        computing = self._computing
        try:
            weighed = loss if share is None else self._shares.weigh(loss, share, num_items_in_batch)
            if computing.accelerator is None or computing.accelerator.backward is computing.own_backward:
                computing.backward(weighed)
            else:
                computing.accelerator.backward(weighed)
        except Exception as error:
            keep_facts(error, loss=loss)
            raise
        return weighed.detach()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: int | torch.Tensor | None = None,
    ) -> Any:
        """Return the loss of one batch, or (loss, outputs).

        Source: the documented `Trainer.compute_loss`.
        """
        if isinstance(self.task, ModelTask):
            loss, outputs = self.task.compute_loss(model, inputs, num_items_in_batch)
            watch = self._shares.found.watch
            if watch is not None and watch.is_open:
                watch.note(inputs, outputs, takes_count=num_items_in_batch is not None and self.task.gives_count)
            if self.args.past_index >= 0:
                self._computing.past = read_memory(outputs, self.args.past_index, has_loss=self.task.returns_loss)
            if num_items_in_batch is not None and self._shares.num_ranks > 1 and self.task.divides_by_count:
                loss = loss * self._shares.num_ranks  # undoes DDP's mean over ranks
            if watch is not None and watch.is_open:
                watch.own_loss = loss
        else:
            result = self.task.training_step(inputs)
            if isinstance(result, torch.Tensor):
                return (result, None) if return_outputs else result
            output = as_step_output(result, step=f"{type(self.task).__name__}.training_step")
            if output.loss is None:
                raise TaskError(
                    f"Cannot train with what {type(self.task).__name__}.training_step returned:",
                    "its StepOutput holds no loss.",
                    "Return StepOutput(loss=...).",
                )
            if self._shares.is_on:
                self._items_check.see(output, inputs)
            if output.logs and self._session is not None:
                self._session.add_logs(output.logs)
            loss, outputs = output.loss, output.outputs
        return (loss, outputs) if return_outputs else loss

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device | None = None
    ) -> tuple[list[Any], int | torch.Tensor | None]:
        """Fetch a step's micro-batches and count their items.

        Args:
            epoch_iterator: The epoch's remaining batches.
            num_batches: How many to fetch; fewer may remain.
            device: Where a count over ranks is summed.

        Returns:
            The batches (an empty list if none are left) and the item count (None if not needed).

        Source: the documented `Trainer.get_batch_samples`.
        """
        batches = list(islice(epoch_iterator, num_batches))
        count = self._get_num_items_in_batch if self._counts_items_itself else self._shares.count
        return batches, count(batches, device) if batches else None

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device | None) -> Any:
        """Return the item count of a step's micro-batches, None if not needed."""
        return self._shares.count(batch_samples, device)

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """Return the context for computing the loss: the precision's autocast unless the model casts itself."""
        if not self._makes_contexts:
            return nullcontext() if self._cast is not None else self._computing.autocast()
        stack = ExitStack()
        stack.enter_context(self.torchdynamo_smart_context_manager())
        stack.enter_context(self.autocast_smart_context_manager())
        return stack

    def torchdynamo_smart_context_manager(self) -> AbstractContextManager[Any]:
        """Return a context that does nothing: a compiled model needs none.

        Source: the documented `Trainer.torchdynamo_smart_context_manager` (4.24).
        """
        return nullcontext()

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """Return the precision's casting context.

        Args:
            cache_enabled: Keep cast weights within the context; False casts them at each use.

        Source: the documented `Trainer.autocast_smart_context_manager`.
        """
        if cache_enabled or not self.precision.policy.autocast:
            return self._computing.autocast()
        return torch.autocast(self.strategy.device_type, dtype=self.precision.policy.compute_dtype, cache_enabled=False)

    def _prepare_input(self, data: Any) -> Any:
        """Move one value to the device; an override sees every value of a nested batch."""
        if isinstance(data, Mapping):
            return type(data)({key: self._prepare_input(value) for key, value in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (tuple, list)):
            values = [self._prepare_input(value) for value in data]
            return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
        return self.strategy.to_device(data)

    def _align_special_tokens(self) -> None:
        """Copy the tokenizer's special tokens to the model's configurations before training; warn about changes."""
        changed = align_special_tokens(self.model, self.processing_class)
        if changed and self.strategy.is_main:
            logger.warning(
                "The tokenizer's special tokens differ from the model's. The model's config and generation "
                "config were changed to the tokenizer's: %s.",
                ", ".join(f"{name}={token}" for name, token in changed.items()),
            )

    def _activate_neftune(self, model: nn.Module) -> nn.Module:
        """Add NEFTune's noise to the embeddings of `model`, until `_deactivate_neftune`; mutates the model."""
        assert self.neftune_noise_alpha is not None
        self._neftune_hook = add_noise(find_embeddings(self.strategy.unwrap(model)), self.neftune_noise_alpha)
        return model

    def _deactivate_neftune(self, model: nn.Module) -> None:
        """Remove the noise; safe to call twice."""
        if self._neftune_hook is not None:
            self._neftune_hook.remove()
        self._neftune_hook = None

    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move a batch to the device, and first the model if this is called outside of a run or an evaluation."""
        if not self._depth:
            self._place_idle()
        if isinstance(inputs, (dict, Mapping)) and not inputs:
            raise TaskError(
                "A batch was made ready for the model.",
                f"It is empty: no column of the data is one that {type(self.model).__name__}.forward takes"
                + (f" ({', '.join(self._signature_columns)})." if self._signature_columns else "."),
                "Rename the columns, or set remove_unused_columns=False.",
            )
        inputs = self._prepare_input(inputs) if self._walks_inputs else self.strategy.to_device(inputs)
        computing = self._computing
        if computing.past is not None:
            inputs = with_memory(inputs, computing.past)
        dtype = computing.input_dtype
        return inputs if dtype is None else cast_inputs(inputs, dtype, labels=self.label_names)

    def _place_idle(self) -> None:
        """Launch the strategy and place the model, for a step that a script calls by itself."""
        self.strategy.launch()
        if not self._is_prepared:
            self.precision.prepare(self.strategy.device, self.strategy.scaler_factory)
            self._is_prepared = True
        place_task(self.task, self.strategy)

    def _move_model_to_device(self, model: nn.Module, device: torch.device | str) -> None:
        """Move a second model, such as a teacher; the Trainer's own is placed by its strategy."""
        model.to(device)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the floating-point operations of one micro-batch, as computed by the model's method of this name.

        For a transformers model without that method: 6 per non-embedding parameter and element of the main input.
        Otherwise 0. Override it to count operations in `state.total_flos`.

        Source: the documented `Trainer.floating_point_ops`.
        """
        model = self.model
        count = getattr(model, "floating_point_ops", None)
        if callable(count):
            return count(inputs)  # type: ignore[no-any-return]
        name = getattr(model, "main_input_name", "input_ids")
        if not hasattr(model, "num_parameters") or name not in inputs:
            return 0
        if self._counted is None or self._counted[0] is not model:
            # Counted once, because it walks over all parameters.
            self._counted = model, model.num_parameters(exclude_embeddings=True)  # type: ignore[operator]
        return int(6 * inputs[name].numel() * self._counted[1])

    def _add_flos(self, number: float) -> None:
        self.current_flos += number

    def store_flos(self) -> None:
        """Add the operations of all processes since the last call to `state.total_flos`; collective."""
        self.state.total_flos += sum(self.strategy.gather_object(float(self.current_flos)))
        self.current_flos = 0

    def _note_sync(self, syncs: bool) -> None:
        """Record whether an update follows the next micro-step, also in the accelerator if there is one."""
        self._computing.syncs = syncs
        if self._computing.accelerator is not None:
            tell_accelerate_sync(self._computing.accelerator, syncs)

    def _make_shares(self) -> LossShares:
        """Return a `LossShares` for the current hooks."""
        is_attribute = not isinstance(type(self).model_accepts_loss_kwargs, property)
        if isinstance(self.task, ModelTask):
            self.task.is_causal |= self._loss_shifts_labels
        hooks = LossHooks(
            owner=type(self).__name__,
            compute_loss_func=self.compute_loss_func,
            is_overridden=self._is_overridden,
            accepts_count=bool(self.model_accepts_loss_kwargs),
            is_declared=is_attribute or self._accepts_declared is not None,
            is_scaled=getattr(self, "loss_is_scaled_for_ga", None),
            loss_takes_count=accepts(self.compute_loss, "num_items_in_batch"),
            shifts_labels=self._loss_shifts_labels,
            get_batch_samples=self._slot_get_batch_samples,
        )
        return LossShares(self.args, self.strategy, self.task, hooks)

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model is given `num_items_in_batch`, to divide its loss by it; a subclass may set it.

        Source: the documented `Trainer.model_accepts_loss_kwargs`.
        """
        return self._accepts_found if self._accepts_declared is None else self._accepts_declared

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, value: bool) -> None:
        self._accepts_declared = bool(value)

    @property
    def current_gradient_accumulation_steps(self) -> int:
        """The number of micro-batches of the current step."""
        return self._shares.num_micro_batches

    @current_gradient_accumulation_steps.setter
    def current_gradient_accumulation_steps(self, number: int) -> None:
        self._shares.num_micro_batches = number

    # Overrides of hooks in classes of hftrain's own.
    _own_hooks: ClassVar[tuple[Any, ...]] = ()

    def _cast_model(self) -> None:
        """Make the model run under autocast, and the code around it in float32, if user code computes a loss.

        Such code then gets float32 outputs, and its operations are not cast, as with transformers' Trainer. Otherwise
        the whole step is cast, which copies no outputs.
        """
        names = filter(self._is_overridden, ("compute_loss", "training_step", "prediction_step"))
        is_users = any(getattr(type(self), name) not in self._own_hooks or name in vars(self) for name in names)
        casts = self.precision.policy.autocast and Owns.CASTING not in self.strategy.owns
        # Copies on several devices call the original's forward pass.
        is_copied = getattr(self.strategy, "num_devices", 1) > 1
        if not casts or is_copied or self._makes_contexts or not isinstance(self.task, ModelTask):
            return
        if is_users or callable(self.compute_loss_func):
            self._cast = ModelCall.of(self.model)
            self._cast.set(autocast=lambda: self._computing.autocast())
