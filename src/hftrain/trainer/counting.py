"""Counting a run's input tokens and floating-point operations; nothing is read before somebody looks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from hftrain.core.log import warn_once
from hftrain.core.progress import Progress
from hftrain.strategies.base import Strategy

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

Count = int | torch.Tensor
Take = Callable[[Iterator[Any], int, torch.device], tuple[list[Any], Any]]


class TokenCounter:
    """Count the tokens of a batch: the elements of the model's main input.

    Args:
        input_name: The main input's name.
        skips_padding: Leave padding out: what the attention mask masks, else what equals the padding token.
        padding_id: The padding token, where one is known.
    """

    def __init__(self, input_name: str, *, skips_padding: bool = False, padding_id: int | None = None) -> None:
        self.input_name = input_name
        self.skips_padding = skips_padding
        self.padding_id = padding_id

    def count(self, batch: Any) -> Count:
        """Return the number of tokens: a plain number, or a 0-d tensor where reading it might synchronise."""
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
    """Count what a run's steps take in, where anybody asked for it, and sum it over ranks when it is read.

    Args:
        trainer: Whose arguments and model say what is counted; its `current_flos` and state are mutated.
    """

    def __init__(self, trainer: Trainer) -> None:
        args = trainer.args
        self._trainer = trainer
        self._counts_tokens = bool(args.include_num_input_tokens_seen or args.include_tokens_per_second)
        names = ("floating_point_ops", "num_parameters")
        self._counts_flos = trainer._is_overridden(names[0]) or any(hasattr(trainer.model, name) for name in names)
        self._counter = token_counter(trainer)
        self._tokens: Count = 0
        self._first_tokens = 0
        trainer.current_flos = 0

    def begin(self) -> None:
        """Remember where this session starts, which a resumed one does not at 0."""
        self._first_tokens = self._trainer.state.num_input_tokens_seen

    def watching(self, take: Take) -> Take:
        """Return a function that takes batches and counts them; the very same one where nothing is counted."""
        if not (self._counts_tokens or self._counts_flos):
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
        if self._counts_flos:
            self._trainer.current_flos += self._trainer.floating_point_ops(batch)

    def read(self) -> None:
        """Bring the state's token count up to date; collective and synchronises, where tokens are counted."""
        if self._counts_tokens:
            strategy = self._trainer.strategy
            tokens = strategy.reduce(torch.as_tensor(self._tokens, device=strategy.device), op="sum")
            self._tokens = 0
            self._trainer.state.num_input_tokens_seen += int(tokens)

    def mark(self) -> tuple[Count, float]:
        """Return what is counted and not read yet, for `reset`."""
        return self._tokens, self._trainer.current_flos

    def reset(self, mark: tuple[Count, float]) -> None:
        """Forget what was counted since a mark, if nothing was read meanwhile."""
        self._tokens, self._trainer.current_flos = mark

    def session_tokens(self) -> int | None:
        """Return the tokens per device since `begin`, None where nobody asked for their speed."""
        return self.num_tokens() if self._trainer.args.include_tokens_per_second else None

    def num_tokens(self) -> int:
        """Return the tokens per device since `begin` that the state knows of."""
        return (self._trainer.state.num_input_tokens_seen - self._first_tokens) // self._trainer.strategy.world_size


def samples_since(first: Progress, now: Progress, strategy: Strategy) -> int:
    """Return the samples that all ranks have trained on since; collective."""
    own = (now.samples - first.samples) // strategy.world_size
    return int(strategy.reduce(torch.tensor(own, device=strategy.device), op="sum"))


def token_counter(trainer: Trainer) -> TokenCounter:
    """Return the counter that suits a Trainer's model and arguments."""
    tool = trainer.processing_class
    padding = getattr(tool, "pad_token_id", getattr(getattr(tool, "tokenizer", None), "pad_token_id", None))
    return TokenCounter(
        getattr(trainer.model, "main_input_name", "input_ids"),
        skips_padding=trainer.args.include_num_input_tokens_seen == "non_padding",
        padding_id=padding if isinstance(padding, int) else None,
    )


def count_tokens(batches: Iterable[Any], counter: TokenCounter, *, max_batches: int | None = None) -> int:
    """Walk once over batches and return their tokens.

    Args:
        batches: A loader.
        counter: Counts one batch.
        max_batches: How many batches to count, going round again where there are fewer; None counts each once.
    """
    counts: list[int] = []
    iterator = iter(batches)
    while max_batches is None or len(counts) < max_batches:
        batch = next(iterator, None)
        if batch is None:
            break
        counts.append(int(counter.count(batch)))
    if not counts or max_batches is None:
        return sum(counts)
    rounds, rest = divmod(max_batches, len(counts))
    return rounds * sum(counts) + sum(counts[:rest])
