"""The documented Seq2SeqTrainer: a Trainer that can evaluate and predict with the model's `generate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from hftrain.arguments.training import Seq2SeqTrainingArguments, TrainingArguments
from hftrain.core.log import warn_once
from hftrain.core.preserve import temporarily
from hftrain.core.tree import detach
from hftrain.core.types import PredictionOutput
from hftrain.evaluation.preparation import generates
from hftrain.extras.seq2seq.generating import (
    check_taken,
    drop_unset,
    fill_with,
    load_generation_config,
    longest_output,
    padding_token,
    prepare_generation,
    run_generate,
)
from hftrain.task.model_task import ModelTask
from hftrain.task.module import TaskModule
from hftrain.trainer.trainer import Trainer


class Seq2SeqTrainer(Trainer):
    """Train sequence-to-sequence models, and evaluate them on generated text.

    It takes the parameters of `Trainer`; `optimizer_cls_and_kwargs` is keyword-only. With
    ``predict_with_generate=True`` in `Seq2SeqTrainingArguments`, evaluations that keep predictions call
    ``model.generate`` on every batch, and `compute_metrics` gets token ids; the loss still comes from a forward pass.
    Any `nn.Module` works whose ``generate(input_ids, ...)`` returns token ids. It receives the columns of a batch that
    it takes, without the labels and without decoder inputs made from them.

    Arguments of `evaluate` and `predict` override `generation_max_length` and `generation_num_beams`. These override
    `generation_config`, which replaces the model's own.

    Raises:
        ConfigError: The model does not accept the generation settings, the model is a `TaskModule`, or FSDP shards it.
        TaskError: The model has no `generate`.
        MissingDependencyError: `generation_config` must be loaded, and transformers is not installed.

    Source: the documented `Seq2SeqTrainer`.
    """

    def __init__(
        self,
        model: TaskModule | nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., torch.Tensor] | None = None,
        compute_metrics: Callable[..., dict[str, Any]] | None = None,
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
        *,
        tokenizer: Any = None,
        **trainer_kwargs: Any,
    ) -> None:
        # By name: the documented order lacks optimizer_cls_and_kwargs. `super` puts __class__ among the locals.
        values = {
            name: value for name, value in locals().items() if name not in ("self", "trainer_kwargs", "__class__")
        }
        super().__init__(**values, **trainer_kwargs)

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, float]:
        """Evaluate like `Trainer.evaluate`, generating tokens if `compute_metrics` needs them. Collective.

        Args:
            **gen_kwargs: Arguments of `generate`, such as `max_length` and `num_beams` (1 is greedy), or `weights` and
                `ckpt` of `Trainer.evaluate`.
        """
        eval_kwargs = {name: gen_kwargs.pop(name) for name in ("weights", "ckpt") if name in gen_kwargs}
        with self._generating(gen_kwargs):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **eval_kwargs)

    def predict(
        self,
        test_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
        **gen_kwargs: Any,
    ) -> PredictionOutput:
        """Predict like `Trainer.predict`; the predictions are generated tokens. Collective.

        Returns:
            (predictions, label_ids, metrics); token ids, padded with the padding token or else the end-of-text token.
        """
        predict_kwargs = {name: gen_kwargs.pop(name) for name in ("weights", "ckpt") if name in gen_kwargs}
        with self._generating(gen_kwargs):
            return super().predict(test_dataset, ignore_keys, metric_key_prefix, **predict_kwargs)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **gen_kwargs: Any,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, generated tokens and labels of one batch (each may be None), without gradients."""
        if prediction_loss_only or not generates(self.args):
            if self._call_kwargs or gen_kwargs:
                needs = "compute_metrics" if generates(self.args) else "predict_with_generate=True"
                names = ", ".join({**self._call_kwargs, **gen_kwargs})
                warn_once(f"Arguments of generate have no effect without {needs}: {names}.")
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        task = self.task
        assert isinstance(task, ModelTask)
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad(), self.compute_loss_context_manager():
            whole: Any = self.model
            # An override may pass, or have set, what replaces the settings of the call.
            options = drop_unset(gen_kwargs or self._gen_kwargs, getattr(whole, "generation_config", None))
            kwargs = {"synced_gpus": True, **options} if self.strategy.shards_model else options
            module = self.strategy.unwrap(model)
            tokens = run_generate(module, inputs, trainer_model=whole, options=kwargs, label_names=self.label_names)
            labels = task.labels_of(inputs)
            has_loss = labels is not None or task.can_return_loss
            # Last, because an override of compute_loss may pop the labels from the batch.
            mean = self._trainer_parts.evaluation.mean if has_loss else None
            if mean is not None:
                mean.open(inputs)
            loss = self._trainer_hooks.compute_loss(model, inputs).detach() if has_loss else None
            if mean is not None:
                mean.see(loss, None)
        length = longest_output(options, getattr(whole, "generation_config", None))
        if length is not None:
            tokens = self._pad_tensors_to_max_len(tokens, length)
            if isinstance(labels, torch.Tensor) and labels.dim() > 1:
                labels = self._pad_tensors_to_max_len(labels, length)
        return loss, tokens, detach(labels)

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """Pad generated tokens or labels up to a length; may be overridden to pad differently."""
        token = padding_token(self.processing_class, self.model)
        missing = max(0, max_length - tensor.shape[-1])
        return tensor if token is None else nn.functional.pad(tensor, (0, missing), value=token)

    # -- internals -----------------------------------------------------------------------------------------------

    def _start_idle(self) -> None:
        super()._start_idle()
        # The arguments of the current evaluate() or predict(), and with those of the training arguments.
        self._call_kwargs: dict[str, Any] = {}
        self._gen_kwargs = self._with_defaults({})
        config = getattr(self.args, "generation_config", None)
        self._generation_config = None if config is None else load_generation_config(config)

    def _on_adopted(self) -> None:
        super()._on_adopted()
        prepare_generation(self.args, self.strategy, self.task, self.model, config=self._generation_config)

    def _with_defaults(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return generation_options(self.args, kwargs) if isinstance(self.args, Seq2SeqTrainingArguments) else kwargs

    def _generating(self, gen_kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Set a call's arguments of `generate` while it runs; nested calls inherit them."""
        if generates(self.args):
            check_taken(self.model, gen_kwargs)
        kwargs = {**self._call_kwargs, **gen_kwargs}
        return temporarily(self, _call_kwargs=kwargs, _gen_kwargs=self._with_defaults(kwargs))

    def _find_filler(self) -> Callable[[Any], Any] | None:
        token = padding_token(self.processing_class, self.model)
        # The output of a user's preprocessing function is not tokens any more.
        if token is None or not generates(self.args) or self.preprocess_logits_for_metrics is not None:
            return None
        return fill_with(token)


def generation_options(args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `generate` for a call: those given, then those of the training arguments.

    Args:
        given: The keyword arguments of `evaluate` or `predict`; None counts as not given. A `generation_config` among
            them replaces all settings of the training arguments.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    if "generation_config" not in options:
        if "max_new_tokens" not in options and args.generation_max_length is not None:
            options.setdefault("max_length", args.generation_max_length)
        if args.generation_num_beams is not None:
            options.setdefault("num_beams", args.generation_num_beams)
    return options
