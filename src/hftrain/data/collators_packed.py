"""A collator without padding: samples concatenated in one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hftrain.data.collators import returned_as


@dataclass
class DataCollatorWithFlattening:
    """Concatenate the samples of a batch into one sequence; position ids restart at each sample.

    The model's attention must separate the samples: by `position_ids`, or by the boundaries in `cu_seq_lens_*`. Many of
    transformers' models do the former, such as Llama, Qwen, Gemma and GPT-2, while their cache is off, as it is when a
    Trainer trains or evaluates; in an own loop, set ``model.config.use_cache = False``. Other models do not separate
    the samples, among them OPT, Falcon, XGLM and BioGPT, and those without an argument `position_ids` (BLOOM, MPT,
    Mamba), of which the Trainer warns: compare the outputs of packed and single samples.

    Args:
        return_position_ids: Return `position_ids`.
        separator_id: The label of each sample's first token, so that no sample predicts the start of the next one.
        return_flash_attn_kwargs: Return the boundaries of samples in FlashAttention's format.
        return_seq_idx: Return each token's sample number.
        position_ids_start: The position of each sample's first token.
        return_tensors: ``"pt"`` or ``"np"``.

    Shapes:
        input_ids, labels, position_ids: ``[1, tokens]``, int64. seq_idx: ``[1, tokens]``, int32.
        cu_seq_lens_q, cu_seq_lens_k: ``[samples + 1]``, int32. max_length_q, max_length_k: Python integers.

    Raises:
        ConfigError: `return_tensors` has another value.

    Source:
        The documented `DataCollatorWithFlattening`.

    Example:
        >>> batch = DataCollatorWithFlattening()([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
        >>> batch["input_ids"].tolist(), batch["position_ids"].tolist(), batch["labels"].tolist()
        ([[5, 6, 7, 8, 9]], [[0, 1, 2, 0, 1]], [[-100, 6, 7, -100, 9]])
    """

    return_position_ids: bool = True
    separator_id: int = -100
    return_flash_attn_kwargs: bool = False
    return_seq_idx: bool = False
    position_ids_start: int = 0
    return_tensors: str = "pt"

    def __call__(self, features: list[Mapping[str, Any]], return_tensors: str | None = None) -> Any:
        """Concatenate the samples in one row; without `labels` the inputs are the labels."""
        rows = [_ids(row["input_ids"]) for row in features]
        name = "labels" if "labels" in features[0] else "input_ids"
        labels = [_ids(row[name]).clone() for row in features]
        for row in labels:
            row[:1] = self.separator_id
        lengths = [len(row) for row in rows]
        batch: dict[str, Any] = {"input_ids": torch.cat(rows)[None], "labels": torch.cat(labels)[None]}
        if self.return_position_ids:
            starts = self.position_ids_start
            batch["position_ids"] = torch.cat([torch.arange(starts, starts + num) for num in lengths])[None]
        if self.return_seq_idx:
            numbers = torch.arange(len(rows), dtype=torch.int32)
            batch["seq_idx"] = numbers.repeat_interleave(torch.tensor(lengths))[None]
        if self.return_flash_attn_kwargs:
            bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
            batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = bounds
            batch["max_length_q"] = batch["max_length_k"] = max(lengths)
        return returned_as(return_tensors or self.return_tensors, batch)


def _ids(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int64)
