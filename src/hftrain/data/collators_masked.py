"""Collators for whole-word masking of BERT's word pieces, permutation language modelling, and multiple choice."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hftrain.core.errors import ConfigError
from hftrain.data.collators import DataCollatorWithPadding, as_list, check_pads, pad_as_asked, pad_features, returned_as
from hftrain.data.collators_text import IGNORED, DataCollatorForLanguageModeling, split_labels

# The largest number of predicted tokens in a sample.
_MOST_PREDICTED = 512


@dataclass
class DataCollatorForWholeWordMask(DataCollatorForLanguageModeling):
    """Mask whole words; a word's later pieces are recognised by BERT's ``##`` prefix.

    Up to a share `mlm_probability` of a sample's tokens is masked, by whole words in random order.
    A sample's `chinese_ref`, if any, lists further tokens that are inside a word.

    `DataCollatorForLanguageModeling(whole_word_mask=True)` supports any tokenizer that returns offsets.

    Source: the documented `DataCollatorForWholeWordMask`.
    """

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> Any:
        """Make a batch of mappings with `input_ids`, or of lists of token ids."""
        rows: list[Mapping[str, Any]] = [row if isinstance(row, Mapping) else {"input_ids": row} for row in features]
        chosen = [self._choose(row) for row in rows]
        batch = pad_features(
            self.tokenizer,
            [{"input_ids": as_list(row["input_ids"])} for row in rows],
            return_tensors="pt",
            pad_to_multiple_of=self.pad_to_multiple_of,
        )
        ids_BL = batch["input_ids"]
        is_chosen_BL = torch.zeros(ids_BL.shape, dtype=torch.bool)
        is_left = getattr(self.tokenizer, "padding_side", "right") == "left"
        for number, places in enumerate(chosen):
            start = ids_BL.shape[1] - len(rows[number]["input_ids"]) if is_left else 0
            is_chosen_BL[number, [start + place for place in places]] = True
        is_chosen_BL &= ~torch.as_tensor(self._special(ids_BL)).bool()
        if self.tokenizer.pad_token_id is not None:
            is_chosen_BL &= ids_BL != self.tokenizer.pad_token_id
        inputs, labels = self._replace(ids_BL, is_chosen_BL, self._generator_for(ids_BL))
        return returned_as(return_tensors or self.return_tensors, {"input_ids": inputs, "labels": labels})

    def _choose(self, row: Mapping[str, Any]) -> list[int]:
        """Return the positions of the tokens to predict."""
        ids = as_list(row["input_ids"])
        inside = set(as_list(row["chinese_ref"])) if "chinese_ref" in row else set()
        words: list[list[int]] = []
        for place, token in enumerate(self.tokenizer.convert_ids_to_tokens(ids)):
            if token in ("[CLS]", "[SEP]"):
                continue
            if words and (place in inside or str(token).startswith("##")):
                words[-1].append(place)
            else:
                words.append([place])
        if self.seed is None:
            random.shuffle(words)
        else:
            generator = self._generator_for(torch.tensor(ids))
            words = [words[index] for index in torch.randperm(len(words), generator=generator).tolist()]
        number = min(_MOST_PREDICTED, max(1, round(len(ids) * self.mlm_probability)))
        chosen: list[int] = []
        for word in words:
            if len(chosen) + len(word) <= number:
                chosen += word
        return chosen


@dataclass
class DataCollatorForPermutationLanguageModeling:
    """Create batches for XLNet's permutation language modelling.

    Args:
        tokenizer: Any object with `pad`, `mask_token_id`, `pad_token_id` and `get_special_tokens_mask`.
        plm_probability: The ratio of a span's length to that of the surrounding context.
        max_span_length: The largest number of tokens in a span.
        return_tensors: ``"pt"`` or ``"np"``.

    Shapes:
        input_ids, labels: ``[batch, length]``, int64. perm_mask, target_mapping: ``[batch, length, length]``, float32.

    Raises:
        ConfigError: The tokenizer cannot pad or has no mask token.

    Source: the documented `DataCollatorForPermutationLanguageModeling`; Yang et al., 2019, arXiv 1906.08237.
    """

    tokenizer: Any
    plm_probability: float = 1 / 6
    max_span_length: int = 5
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        check_pads(self.tokenizer)
        if getattr(self.tokenizer, "mask_token_id", None) is None:
            reason = f"{type(self.tokenizer).__name__} has no mask token."
            asked = "Cannot make batches for permuted language modelling:"
            raise ConfigError(asked, reason, "Use a tokenizer that has one.")

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> Any:
        """Make a batch of mappings with `input_ids`, or of lists of token ids.

        Raises:
            ConfigError: The batch's length is odd; a `ValueError`, as in transformers.
        """
        ids = [as_list(row["input_ids"] if isinstance(row, Mapping) else row) for row in features]
        ids_BL = pad_features(self.tokenizer, [{"input_ids": row} for row in ids], return_tensors="pt")["input_ids"]
        length = ids_BL.shape[1]
        if length % 2:
            asked, reason = (
                f"Cannot permute sequences of {length} tokens:",
                "the two halves are permuted, so the length must be even.",
            )
            raise ConfigError(asked, reason, "Pad or truncate the samples to an even length.")
        is_special_BL = torch.tensor(
            [self.tokenizer.get_special_tokens_mask(row, already_has_special_tokens=True) for row in ids_BL.tolist()]
        ).bool()
        if self.tokenizer.pad_token_id is not None:
            is_special_BL |= ids_BL == self.tokenizer.pad_token_id
        is_chosen_BL = torch.stack([self._spans(length) for _ in ids]) & ~is_special_BL
        batch = {
            "input_ids": ids_BL.masked_fill(is_chosen_BL, self.tokenizer.mask_token_id),
            "perm_mask": torch.stack([_hidden(*rows) for rows in zip(is_chosen_BL, is_special_BL, strict=True)]),
            "target_mapping": torch.eye(length).repeat(len(ids), 1, 1),
            "labels": ids_BL.masked_fill(~is_chosen_BL, IGNORED),
        }
        return returned_as(return_tensors or self.return_tensors, batch)

    def _spans(self, length: int) -> torch.Tensor:
        """Draw the spans of one sample: one in each context, at a random position."""
        is_chosen_L, place = torch.zeros(length, dtype=torch.bool), 0
        while place < length:
            span = int(torch.randint(1, self.max_span_length + 1, (1,)))
            stretch = int(span / self.plm_probability)
            start = place + int(torch.randint(stretch - span + 1, (1,)))
            is_chosen_L[start : start + span] = True
            place += stretch
        return is_chosen_L


@dataclass
class DataCollatorForMultipleChoice(DataCollatorWithPadding):
    """Pad the choices of all samples to the same length; the arguments are those of `DataCollatorWithPadding`.

    Shapes:
        each input: ``[batch, choices, length]``. labels: ``[batch]``, int64.

    Raises:
        ConfigError: The tokenizer cannot pad.

    Source: the documented `DataCollatorForMultipleChoice`.
    """

    def __call__(self, features: list[Mapping[str, Any]], return_tensors: str | None = None) -> Any:
        """Make a batch of samples whose parts hold one entry for each choice; ``label`` becomes ``labels``."""
        inputs, labels = split_labels(features)
        num_choices = len(inputs[0]["input_ids"])
        choices = [
            {key: value[choice] for key, value in row.items()} for row in inputs for choice in range(num_choices)
        ]
        padded = pad_as_asked(self, choices)
        batch = {key: value.view(len(features), num_choices, -1) for key, value in padded.items()}
        if labels is not None:
            batch["labels"] = torch.tensor(labels, dtype=torch.int64)
        return returned_as(return_tensors or self.return_tensors, batch)


def _hidden(is_chosen_L: torch.Tensor, is_special_L: torch.Tensor) -> torch.Tensor:
    """Return 1 if token i must not attend to token j: j is predicted, and not before i in the random order."""
    length = len(is_chosen_L)
    pairs = torch.arange(length).reshape(2, length // 2).T
    order_L = pairs[torch.randperm(length // 2)].T.flatten()
    # Tokens that are neither predicted nor special come first.
    order_L = order_L.masked_fill(~is_chosen_L & ~is_special_L, -1)
    return ((order_L[:, None] <= order_L[None, :]) & is_chosen_L).float()
