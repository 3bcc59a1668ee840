"""Count a run's input tokens and floating-point operations; counts are read from the device only on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import nn

from hftrain.arguments.training import TrainingArguments
from hftrain.core.log import warn_once
from hftrain.core.seed import preserved_rng
from hftrain.core.state import Progress
from hftrain.run.parts import RunParts, Take
from hftrain.strategies.base import Ranks

Count = int | torch.Tensor


class TokenCounter:
    """Count the tokens of a batch: the elements of the model's main input.

    Args:
        skips_padding: Leave out padding: masked positions, or without an attention mask the padding token.
    """

    def __init__(self, input_name: str, *, skips_padding: bool = False, padding_id: int | None = None) -> None:
        self.input_name = input_name
        self.skips_padding = skips_padding
        self.padding_id = padding_id

    @classmethod
    def of(cls, args: TrainingArguments, model: nn.Module, tool: Any) -> TokenCounter:
        """Return the counter for a model, its processing class and the arguments."""
        padding = getattr(tool, "pad_token_id", getattr(getattr(tool, "tokenizer", None), "pad_token_id", None))
        return cls(
            getattr(model, "main_input_name", "input_ids"),
            skips_padding=args.include_num_input_tokens_seen == "non_padding",
            padding_id=padding if isinstance(padding, int) else None,
        )

    @preserved_rng()
    def count_all(self, batches: Iterable[Any], *, max_batches: int | None = None) -> int:
        """Iterate over batches and return their number of tokens; random numbers are restored.

        Args:
            max_batches: How many batches to count, starting again if there are fewer; None counts each once.
        """
        counts = [int(self.count(batch)) for batch in islice(batches, max_batches)]
        if not counts or max_batches is None:
            return sum(counts)
        rounds, num_remaining = divmod(max_batches, len(counts))
        return rounds * sum(counts) + sum(counts[:num_remaining])

    def count(self, batch: Any) -> Count:
        """Return the number of tokens: a plain number, or a 0-d tensor if reading it could synchronise."""
        tokens = batch.get(self.input_name) if isinstance(batch, (dict, Mapping)) else None
        if not isinstance(tokens, torch.Tensor):
            warn_once(
                f"Tokens cannot be counted: a batch has no tensor {self.input_name!r}. Set `main_input_name` on the "
                "model to the input that holds them."
            )
            return 0
        if not self.skips_padding:
            return tokens.numel()
        mask = batch.get("attention_mask")
        if isinstance(mask, torch.Tensor):
            return (mask != 0).sum()
        if self.padding_id is not None:
            return (tokens != self.padding_id).sum()
        warn_once(
            "include_num_input_tokens_seen='non_padding' finds neither an attention_mask in the batch nor a padding "
            "token: every token counts."
        )
        return tokens.numel()


class RunCounts:
    """Count tokens and operations of a run's steps if requested, and sum them over ranks when read.

    Args:
        parts: `num_input_tokens_seen` of their state is mutated.
    """

    def __init__(self, parts: RunParts, model: nn.Module) -> None:
        args, trainer, names = parts.args, parts.trainer, ("floating_point_ops", "num_parameters")
        self._data, self._state, self._trainer = parts.strategy.data, parts.state, trainer
        self._counter = TokenCounter.of(args, model, trainer.processing_class)
        counts_flos = parts.hooks.is_overridden(names[0]) or any(hasattr(model, name) for name in names)
        self._count_flos = trainer.floating_point_ops if counts_flos else None
        self._counts_tokens = bool(args.include_tokens_per_second or args.include_num_input_tokens_seen)
        self._tokens: Count = 0
        self._flos: float = 0
        self._first_tokens = 0

    def begin(self) -> None:
        """Store the counts at the start of this session; a resumed one does not start at 0."""
        self._first_tokens = self._state.num_input_tokens_seen

    def watching(self, take: Take) -> Take:
        """Return a function that takes batches and counts them; `take` itself if nothing is counted."""
        if not self._counts_tokens and self._count_flos is None:
            return take

        def counted(epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
            batches, num_items = take(epoch_iterator, num_batches, device)
            for batch in batches:
                self._add(batch)
            return batches, num_items

        return counted

    def _add(self, batch: Any) -> None:
        if self._counts_tokens:
            self._tokens = self._tokens + self._counter.count(batch)
        if self._count_flos is not None:
            self._flos += self._count_flos(batch)

    def read(self) -> None:
        """Update the state's token count; collective and synchronises if tokens are counted."""
        self._trainer.current_flos += self._flos
        self._flos = 0
        if self._counts_tokens:
            self._state.num_input_tokens_seen += int(self._data.reduce(torch.as_tensor(self._tokens), op="sum"))
            self._tokens = 0

    def store(self) -> None:
        """Update the documented counts of tokens and floating-point operations; collective."""
        self.read()
        self._trainer.store_flos()

    def mark(self) -> tuple[Count, float]:
        """Return the counts that are not read yet, for `reset`."""
        return self._tokens, self._flos

    def reset(self, mark: tuple[Count, float]) -> None:
        """Drop the counts since a mark, if nothing was read meanwhile."""
        self._tokens, self._flos = mark

    def num_tokens(self) -> int:
        """Return the tokens per device since `begin` according to the state."""
        return (self._state.num_input_tokens_seen - self._first_tokens) // self._data.world_size


def samples_since(first: Progress, current: Progress, data: Ranks) -> int:
    """Return the samples that all data ranks have trained on since `first`; collective."""
    num_own = (current.samples - first.samples) // data.world_size
    return int(data.reduce(torch.tensor(num_own), op="sum"))
