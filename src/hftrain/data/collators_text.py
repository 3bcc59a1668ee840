"""Collators for tokenized text: padded labels, masked and causal language modelling."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from hftrain.core.errors import ConfigError, TaskError
from hftrain.core.log import warn_once
from hftrain.data.collators import as_list, check_pads, pad_as_asked, pad_features, returned_as
from hftrain.data.seeding import derive_seed

IGNORED = -100


@dataclass
class DataCollatorForSeq2Seq:
    """Pad the inputs with the tokenizer, and the label sequences to the longest one.

    Args:
        tokenizer: Any object with `pad`; its `padding_side` (right by default) also applies to the labels.
        model: A model; its `prepare_decoder_input_ids_from_labels`, if any, makes `decoder_input_ids` from labels.
        padding: True or ``"longest"`` for the longest sample, ``"max_length"``, or False.
        max_length: Length to pad to for ``"max_length"``.
        pad_to_multiple_of: Round lengths up to a multiple of this.
        label_pad_token_id: The value that pads labels.
        return_tensors: ``"pt"`` or ``"np"``.

    Raises:
        ConfigError: The tokenizer cannot pad.

    Shapes:
        labels: ``[batch, longest label]``, int64.

    Source:
        The documented `DataCollatorForSeq2Seq`.
    """

    tokenizer: Any
    model: Any = None
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        check_pads(self.tokenizer)

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> Any:
        """Pad the samples into a batch.

        Raises:
            TaskError: Labels differ in length, and `padding` is False.
        """
        inputs, labels = split_labels(features)
        batch = pad_as_asked(self, inputs)
        if labels is not None:
            batch["labels"] = self._pad_labels(labels)
            if hasattr(self.model, "prepare_decoder_input_ids_from_labels"):
                batch["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
        return returned_as(return_tensors or self.return_tensors, batch)

    def _pad_labels(self, labels: list[list[int]]) -> torch.Tensor:
        width = max(map(len, labels))
        if self.padding in (False, "do_not_pad"):
            if any(len(row) != width for row in labels):
                raise _ragged("labels")
        elif self.padding == "max_length" and self.max_length is not None:
            width = max(width, self.max_length)
        if self.padding not in (False, "do_not_pad") and self.pad_to_multiple_of:
            width = -(-width // self.pad_to_multiple_of) * self.pad_to_multiple_of
        return _pad_rows(labels, width, self.label_pad_token_id, _side(self.tokenizer))


@dataclass
class DataCollatorForTokenClassification:
    """Pad the inputs with the tokenizer, and the token labels to the same length.

    Args:
        tokenizer: Any object with `pad`.
        padding: True or ``"longest"`` for the longest sample, ``"max_length"``, or False.
        max_length: Length to pad to for ``"max_length"``.
        pad_to_multiple_of: Round lengths up to a multiple of this.
        label_pad_token_id: The value that pads labels.
        return_tensors: ``"pt"`` or ``"np"``.

    Raises:
        ConfigError: The tokenizer cannot pad.

    Shapes:
        labels: As `input_ids`, int64.

    Source:
        The documented `DataCollatorForTokenClassification`.
    """

    tokenizer: Any
    padding: bool | str = True
    max_length: int | None = None
    pad_to_multiple_of: int | None = None
    label_pad_token_id: int = IGNORED
    return_tensors: str = "pt"

    def __post_init__(self) -> None:
        check_pads(self.tokenizer)

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> Any:
        """Pad the samples into a batch; ``label`` becomes ``labels``.

        Raises:
            TaskError: A sample has more labels than tokens.
        """
        inputs, labels = split_labels(features)
        batch = pad_as_asked(self, inputs)
        if labels is not None:
            width = batch["input_ids"].shape[1]
            batch["labels"] = _pad_rows(labels, width, self.label_pad_token_id, _side(self.tokenizer))
        return returned_as(return_tensors or self.return_tensors, batch)


@dataclass
class DataCollatorForLanguageModeling:
    """Pad the samples and create language modelling labels from the inputs.

    Causal (`mlm=False`): labels are the inputs, padding ignored. Masked: a share `mlm_probability` of the
    non-special tokens is predicted; of these, a share `mask_replace_prob` becomes the mask token, `random_replace_prob`
    a random token, and the rest stay unchanged.

    With `whole_word_mask`, words are chosen and all their tokens become mask tokens; the samples' offsets
    (`offset_mapping`, which a fast tokenizer returns on request) mark where words begin.

    With `seed`, the masks depend only on the seed, the epoch and the batch's content, not on workers, ranks,
    other random numbers or a resume. Without it, they come from the process's generator, which checkpoints save.

    Args:
        tokenizer: Any object with `pad` and `pad_token_id`; for masking also `mask_token_id`, a vocabulary size (`len`
            or `vocab_size`) and `get_special_tokens_mask` (or `all_special_ids`).
        mlm: Masked language modelling, or causal.
        whole_word_mask: Mask whole words.
        mlm_probability: The share of tokens to predict.
        mask_replace_prob: The share of these that are masked.
        random_replace_prob: The share of these that become random tokens.
        pad_to_multiple_of: Round lengths up to a multiple of this.
        return_tensors: ``"pt"`` or ``"np"``.
        seed: Makes the masks independent of other random numbers.

    Raises:
        ConfigError: The tokenizer cannot pad or has no mask token, a share is out of range, or words are masked without
            `mlm`.

    Source:
        The documented `DataCollatorForLanguageModeling`; the masking is BERT's (Devlin et al., 2018).
    """

    tokenizer: Any
    mlm: bool = True
    _: KW_ONLY
    whole_word_mask: bool = False
    mlm_probability: float = 0.15
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    return_tensors: str = "pt"
    seed: int | None = None
    _epoch: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_pads(self.tokenizer)
        # Shared memory, because persistent workers have their own copy of this object.
        self._epoch = torch.tensor(0, device="cpu").share_memory_()  # type: ignore[no-untyped-call]
        shares = (self.mlm_probability, self.mask_replace_prob, self.random_replace_prob)
        if any(not 0 <= share <= 1 for share in shares) or self.mask_replace_prob + self.random_replace_prob > 1:
            raise ConfigError(
                "Tokens were to be masked.",
                "The shares must lie in [0, 1], and those of masked and random tokens add up to at most 1.",
                "Correct them.",
                mlm_probability=self.mlm_probability,
                mask_replace_prob=self.mask_replace_prob,
                random_replace_prob=self.random_replace_prob,
            )
        if self.whole_word_mask:
            self._mask_words_only()
        if self.mlm and getattr(self.tokenizer, "mask_token_id", None) is None:
            raise ConfigError(
                "Cannot mask tokens (mlm=True).",
                f"{type(self.tokenizer).__name__} has no mask token.",
                "Use a tokenizer with one, or mlm=False for causal language modelling.",
            )

    def _mask_words_only(self) -> None:
        if not self.mlm:
            reason, remedy = "causal language modelling masks nothing.", "Set mlm=True, or leave whole_word_mask out."
            raise ConfigError("Cannot use whole_word_mask=True with mlm=False:", reason, remedy)
        if (self.mask_replace_prob, self.random_replace_prob) not in ((0.8, 0.1), (1, 0)):
            warn_once(
                "whole_word_mask=True masks every chosen token: mask_replace_prob and random_replace_prob are ignored."
            )
        self.mask_replace_prob, self.random_replace_prob = 1.0, 0.0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the masks of the next batches, if `seed` is set."""
        self._epoch.fill_(epoch)

    def __call__(self, features: list[Any], return_tensors: str | None = None) -> Any:
        """Make a batch of mappings with `input_ids`, or of lists of token ids."""
        is_named = isinstance(features[0], Mapping)
        rows = [dict(row) if is_named else {"input_ids": as_list(row)} for row in features]
        offsets = [row.pop("offset_mapping", None) for row in rows]
        batch = pad_features(self.tokenizer, rows, return_tensors="pt", pad_to_multiple_of=self.pad_to_multiple_of)
        special = batch.pop("special_tokens_mask", None)
        if not is_named:
            batch = {"input_ids": batch["input_ids"]}
        if self.mlm:
            batch["input_ids"], batch["labels"] = self._mask(batch["input_ids"], special, offsets)
        else:
            batch["labels"] = batch["input_ids"].clone()
            if self.tokenizer.pad_token_id is not None:
                batch["labels"][batch["labels"] == self.tokenizer.pad_token_id] = IGNORED
        return returned_as(return_tensors or self.return_tensors, batch)

    def _mask(self, ids_BL: torch.Tensor, special: Any, offsets: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input ids and the labels. B: batch, L: length."""
        generator = self._generator_for(ids_BL)
        is_special_BL = torch.as_tensor(self._special(ids_BL) if special is None else special).bool()
        words_BL = _words(offsets, is_special_BL) if self.whole_word_mask else None
        is_fixed_BL = is_special_BL if words_BL is None else ~_is_first(words_BL)
        is_chosen_BL = torch.bernoulli(
            torch.full(ids_BL.shape, float(self.mlm_probability)).masked_fill(is_fixed_BL, 0.0), generator=generator
        ).bool()
        if words_BL is not None:
            is_same_BLL = (words_BL[:, :, None] == words_BL[:, None, :]) & (words_BL >= 0)[:, :, None]
            is_chosen_BL = (is_same_BLL & is_chosen_BL[:, None, :]).any(dim=2)
        return self._replace(ids_BL, is_chosen_BL, generator)

    def _replace(
        self, ids_BL: torch.Tensor, is_chosen_BL: torch.Tensor, generator: torch.Generator | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input ids and the labels for the chosen tokens."""

        def draw(share: float) -> torch.Tensor:
            return torch.bernoulli(torch.full(ids_BL.shape, float(share)), generator=generator).bool()

        labels_BL = ids_BL.masked_fill(~is_chosen_BL, IGNORED)
        is_masked_BL = draw(self.mask_replace_prob) & is_chosen_BL
        masked_BL = ids_BL.masked_fill(is_masked_BL, self.tokenizer.mask_token_id)
        if self.random_replace_prob > 0 and self.mask_replace_prob < 1:
            is_random_BL = draw(self.random_replace_prob / (1 - self.mask_replace_prob)) & is_chosen_BL & ~is_masked_BL
            words_BL = torch.randint(self._vocabulary_size(), ids_BL.shape, generator=generator)
            masked_BL = torch.where(is_random_BL, words_BL, masked_BL)
        return masked_BL, labels_BL

    def _generator_for(self, ids: torch.Tensor) -> torch.Generator | None:
        """Return the generator for the masks of these ids; None for torch's global one."""
        if self.seed is None:
            return None
        content = zlib.crc32(ids.numpy().tobytes())
        return torch.Generator().manual_seed(derive_seed(self.seed, int(self._epoch), content))

    def _special(self, ids_BL: torch.Tensor) -> Any:
        tell = getattr(self.tokenizer, "get_special_tokens_mask", None)
        if callable(tell):
            return [tell(row, already_has_special_tokens=True) for row in ids_BL.tolist()]
        known = {*getattr(self.tokenizer, "all_special_ids", ()), self.tokenizer.pad_token_id} - {None}
        return torch.isin(ids_BL, torch.tensor(sorted(known), dtype=ids_BL.dtype))

    def _vocabulary_size(self) -> int:
        return len(self.tokenizer) if hasattr(self.tokenizer, "__len__") else int(self.tokenizer.vocab_size)


def _words(offsets: list[Any], is_special_BL: torch.Tensor) -> torch.Tensor:
    """Return each token's word number, -1 for special tokens: a gap in the text begins a word."""
    if any(row is None for row in offsets):
        raise TaskError(
            "Cannot mask whole words:",
            "the samples have no offset_mapping, which marks where words begin.",
            "Tokenize with return_offsets_mapping=True and keep that column (remove_unused_columns=False).",
        )
    length = is_special_BL.shape[1]
    padded = [[*(list(pair) for pair in row), *[[0, 0]] * (length - len(row))] for row in offsets]
    start_BL, end_BL = torch.tensor(padded).unbind(dim=2)
    gap_BL = start_BL != end_BL.roll(1, dims=1)
    after_special_BL = is_special_BL.roll(1, dims=1)
    gap_BL[:, 0], after_special_BL[:, 0] = True, False
    is_new_BL = ~is_special_BL & (gap_BL | after_special_BL)
    return is_new_BL.cumsum(dim=1).masked_fill(is_special_BL, -1)


def _is_first(words_BL: torch.Tensor) -> torch.Tensor:
    """Return which tokens begin a word; words are numbered in order."""
    highest_BL = words_BL.cummax(dim=1).values
    before_BL = torch.cat([torch.zeros_like(highest_BL[:, :1]), highest_BL[:, :-1].clamp(min=0)], dim=1)
    return words_BL > before_BL


def split_labels(features: list[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Remove and return the labels, because tokenizers do not pad them; None if there are none."""
    name = next((name for name in ("label", "labels", "label_ids") if name in features[0]), None)
    inputs = [{key: value for key, value in row.items() if key != name} for row in features]
    if name is None or all(row[name] is None for row in features):
        return inputs, None
    return inputs, [row[name] for row in features]


def _pad_rows(rows: list[list[int]], width: int, value: int, side: str) -> torch.Tensor:
    if any(len(row) > width for row in rows):
        raise _ragged("labels")
    padding = [[value] * (width - len(row)) for row in rows]
    pairs = zip(map(as_list, rows), padding, strict=True)
    return torch.tensor([row + more if side == "right" else more + row for row, more in pairs], dtype=torch.int64)


def _side(tokenizer: Any) -> str:
    return str(getattr(tokenizer, "padding_side", "right"))


def _ragged(name: str) -> TaskError:
    return TaskError(
        f"The {name} of a batch were to become one tensor.",
        "Their lengths do not fit together.",
        "Use padding=True, and for token classification one label per token.",
    )
