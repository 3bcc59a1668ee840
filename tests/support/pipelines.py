"""Tiny models, ragged batches and runs of some steps, for the tests of pipelines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

VOCABULARY = 19


class Shift(nn.Module):
    """A part that is called without a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 6))

    def forward(self) -> torch.Tensor:
        return self.weight.tanh()


class Plain(nn.Module):
    """A model with an `nn.Sequential` of layers of different widths and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shift = nn.Embedding(VOCABULARY, 6), Shift()
        self.blocks = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.GELU(), nn.Linear(5, 7))
        self.head = nn.Linear(7, VOCABULARY)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.head(self.blocks(self.embed(input_ids) + self.shift()))
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        return loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch), logits


def make_model(kind: str, layers: int = 4) -> nn.Module:
    """Return a tiny model in float64, always with the same weights."""
    torch.manual_seed(5)
    if kind == "plain":
        return Plain().double()
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": VOCABULARY, "tie_word_embeddings": kind != "llama"}
    if kind == "gpt2":
        config: Any = GPT2Config(
            n_embd=8, n_head=2, n_layer=layers, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes
        )
        return GPT2LMHeadModel(config).double()
    config = LlamaConfig(
        hidden_size=8, intermediate_size=12, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        pad_token_id=0, **sizes,
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


def make_batch(seed: int, rows: int = 5, length: int = 7) -> dict[str, torch.Tensor]:
    """Return a batch with padding and ragged labels, whose first samples have no label."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (rows, length), generator=generator)
    labels = ids.clone()
    mask = torch.ones_like(ids)
    for row in range(rows):
        end = length - (row + seed) % 4
        mask[row, end:], ids[row, end:], labels[row, end:] = 0, 0, -100
    labels[: max(rows // 3, 1)] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@contextmanager
def float64() -> Iterator[None]:
    """Let transformers compute losses and norms in float64, where it converts to float32."""
    real_float, real_to = torch.Tensor.float, torch.Tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.dtype == torch.float64 and args[:1] == (torch.float32,):
            args = args[1:]
        return real_to(self, *args, **kwargs) if args or kwargs else self

    torch.Tensor.float, torch.Tensor.to = (lambda self: self), to  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.float, torch.Tensor.to = real_float, real_to  # type: ignore[method-assign]


def train(model: nn.Module, module: nn.Module, *, steps: int = 5, accumulation: int = 1) -> dict[str, Any]:
    """Train some steps; return losses, the first gradients and the last weights of what is not on the meta device.

    Args:
        model: What is called.
        module: The model that it holds.
    """
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses, grads = [], {}
    for step in range(steps):
        for part in range(accumulation):
            batch: dict[str, Any] = make_batch(10 * step + part)
            if isinstance(module, Plain):
                batch["num_items_in_batch"] = int((batch["labels"] != -100).sum())
            outputs = model(**batch)
            loss = outputs[0] if isinstance(outputs, tuple) else outputs["loss"]
            (loss * (0.3 + part)).backward()
            losses.append(loss.item())
        if step == 0:
            grads = {name: x.grad.tolist() for name, x in module.named_parameters() if x.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        outputs = model(**make_batch(77))
    model.train()
    values = [outputs[0], outputs[1]] if isinstance(outputs, tuple) else [outputs["loss"], outputs["logits"]]
    weights = {name: x.tolist() for name, x in module.named_parameters() if not x.is_meta}
    names = [name for name, _ in module.named_parameters()]
    return {
        "losses": losses, "grads": grads, "weights": weights, "names": names,
        "evaluated": [x.tolist() for x in values],
    }  # fmt: skip
