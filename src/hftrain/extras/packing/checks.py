"""Checks of documents packed in one row: that nothing lets one of them read its neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.core.errors import ConfigError
from hftrain.core.log import warn_once
from hftrain.core.parameters import attention_of
from hftrain.core.seed import preserved_rng
from hftrain.task.introspect import forward_parameters
from hftrain.task.model_task import ModelTask
from hftrain.task.modes import preserved_modes
from hftrain.task.module import TaskModule

# Collators that only stack the rows.
_STACKING = ("default_data_collator", "DefaultDataCollator", "default_collate")
_NUM_TOKENS = 8  # of each of the two documents that are tried
# The share of one document's effect on the next that rounding may leave, as where experts get other batches.
_ROUNDING = 0.01


def check_flattening(args: TrainingArguments, task: TaskModule, collator: Any) -> None:
    """Raise if documents are to be packed in one row with a cache: transformers' models then do not separate them.

    Warn if a plain model has no argument for their boundaries. It may still read one of its ``**kwargs``.

    Args:
        collator: transformers' `DataCollatorWithFlattening`.
    """
    _refuse_cache(args, f"{type(collator).__name__}, which packs documents in one row")
    takes_positions = collator.return_position_ids and "position_ids" in forward_parameters(task.model)
    if isinstance(task, ModelTask) and not (
        takes_positions or collator.return_flash_attn_kwargs or collator.return_seq_idx
    ):
        warn_once(
            f"{type(collator).__name__} packs documents in one row, and {type(task.model).__name__} may not separate "
            "them: it is not given position_ids as an argument of its forward. Compare its outputs of packed and of "
            "single documents, or use a collator that pads."
        )


def check_packed_rows(args: TrainingArguments, model: nn.Module, collator: Any) -> None:
    """Raise if rows of `pack_dataset` would be trained on with documents that read their neighbours.

    The model is tried on two documents of eight tokens: if the second one's outputs depend on the first one although
    the positions restart, it is refused. It runs four times, in evaluation mode, and random numbers are restored.
    """
    rows = f"rows of pack_dataset with {type(model).__name__}"
    _refuse_cache(args, "rows of pack_dataset")
    if getattr(collator, "__name__", type(collator).__name__) not in _STACKING:
        raise ConfigError(
            f"Cannot use {type(collator).__name__} with rows of pack_dataset:",
            "the rows are complete, and an attention mask or other labels would join their documents again.",
            "Pass data_collator=hftrain.default_data_collator.",
        )
    if not {"input_ids", "position_ids"} <= forward_parameters(model).keys():
        raise _refusal(rows, "its forward takes no input_ids and position_ids, by which documents are told apart.")
    attention = attention_of(model)
    if "flash" in attention:
        # It reads positions only in a batch of one row, and runs on GPUs only: it cannot be tried here.
        if max(args.train_batch_size, args.eval_batch_size) > 1:
            raise _refusal(rows, f"{attention} tells documents apart in batches of one row only.")
        return
    if any(parameter.is_meta or not parameter.numel() for parameter in model.parameters()):
        warn_once(f"{type(model).__name__} has no weights yet: whether it keeps packed documents apart was not tried.")
        return
    if _leak(model) > _ROUNDING:
        raise _refusal(rows, "the outputs of a document depend on the one before it, although the positions restart.")


def _refuse_cache(args: TrainingArguments, subject: str) -> None:
    settings = {name: getattr(args, name, None) for name in ("use_cache", "predict_with_generate")}
    settings = {name: value for name, value in settings.items() if value} | {"past_index": args.past_index}
    name, value = next(iter(settings.items()))
    if value is True or value >= 0:
        raise ConfigError(
            f"Cannot use {name}={value} with {subject}.",
            "With a cache of keys and values, each document would attend to those before it.",
            f"Leave {name} out, or use a collator that pads.",
        )


def _leak(model: nn.Module) -> float:
    """Return how much one document changes the outputs of the next, of what it changes without a boundary."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    ids = torch.arange(2 * _NUM_TOKENS, device=device) % 2
    changed = torch.cat([1 - ids[:_NUM_TOKENS], ids[_NUM_TOKENS:]])
    positions_of_one = torch.arange(2 * _NUM_TOKENS, device=device)
    options = {"use_cache": False} if "use_cache" in forward_parameters(model) else {}

    def change(positions: torch.Tensor) -> float:
        outputs = [model(input_ids=tokens[None], position_ids=positions[None], **options) for tokens in (ids, changed)]
        first, second = (_logits(output)[0, _NUM_TOKENS:].double() for output in outputs)
        return float((first - second).abs().max())

    with preserved_modes(model), torch.no_grad(), preserved_rng():
        model.eval()
        change_apart = change(positions_of_one % _NUM_TOKENS)
        return change_apart / max(change(positions_of_one), 1e-30) if change_apart else 0.0


def _logits(output: Any) -> torch.Tensor:
    values = getattr(output, "logits", output)
    values = list(values.values()) if hasattr(values, "values") and not isinstance(values, torch.Tensor) else values
    return values if isinstance(values, torch.Tensor) else next(iter(values))


def _refusal(subject: str, reason: str) -> ConfigError:
    remedy = "Use a model that reads position_ids, such as Llama, Qwen or GPT-2, or pad single documents."
    return ConfigError(f"Cannot use {subject}:", reason, remedy)
