"""A small GPT, written in this file, learns the text of Python's own standard library, character by character.

    python examples/char_language_model.py
    python examples/char_language_model.py --steps 1000 --precision bf16

It prints its speed in tokens per second and, at the end, a sample of what it would write.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from hftrain import StepOutput, TaskModule, Trainer, TrainerCallback, TrainingArguments, set_seed

# Shapes in names: B batch, T position, V vocabulary, C channel, H head, D channel of one head.


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, num_channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_qkv = nn.Linear(num_channels, 3 * num_channels, bias=False)
        self.output = nn.Linear(num_channels, num_channels, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Mix each position with those before it."""
        size, length, channels = x_BTC.shape
        q, k, v = (
            part.view(size, length, self.num_heads, -1).transpose(1, 2) for part in self.to_qkv(x_BTC).chunk(3, dim=-1)
        )
        mixed_BHTD = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed_BHTD.transpose(1, 2).reshape(size, length, channels))


class Block(nn.Module):
    """Attention and a feed-forward network, each with its norm and residual."""

    def __init__(self, num_channels: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(num_channels)
        self.attention = Attention(num_channels, num_heads)
        self.feed_forward_norm = nn.LayerNorm(num_channels)
        self.feed_forward = nn.Sequential(
            nn.Linear(num_channels, 4 * num_channels), nn.GELU(), nn.Linear(4 * num_channels, num_channels)
        )

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Return the same shape."""
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        return x_BTC + self.feed_forward(self.feed_forward_norm(x_BTC))


class GPT(nn.Module):
    """A decoder-only transformer over characters."""

    def __init__(
        self, vocabulary_size: int, *, length: int, num_channels: int, num_heads: int, num_layers: int
    ) -> None:
        super().__init__()
        self.length = length
        self.characters = nn.Embedding(vocabulary_size, num_channels)
        self.positions = nn.Embedding(length, num_channels)
        self.blocks = nn.Sequential(*(Block(num_channels, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(num_channels)
        self.head = nn.Linear(num_channels, vocabulary_size, bias=False)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Return logits_BTV of the next character at each position."""
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        return self.head(self.norm(self.blocks(self.characters(tokens_BT) + self.positions(positions_T))))

    @torch.no_grad()
    def write(self, tokens_T: torch.Tensor, num_tokens: int, temperature: float = 0.7) -> torch.Tensor:
        """Continue a text by `num_tokens` characters."""
        for _ in range(num_tokens):
            logits_V = self(tokens_T[None, -self.length :])[0, -1] / temperature
            tokens_T = torch.cat([tokens_T, torch.multinomial(logits_V.softmax(dim=-1), 1)])
        return tokens_T


class NextCharacter(TaskModule):
    """Predict each next character; the loss is the mean over characters, in nats."""

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        """Return the cross-entropy of the next characters."""
        logits_BTV = self.model(batch["inputs"])
        return StepOutput(loss=nn.functional.cross_entropy(logits_BTV.flatten(0, 1), batch["labels"].flatten()))


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Every window of a text that starts at a multiple of its length, and the same shifted by one."""

    def __init__(self, tokens: torch.Tensor, length: int) -> None:
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.tokens[index * self.length : (index + 1) * self.length + 1]
        return {"inputs": window[:-1], "labels": window[1:]}


class TokensPerSecond(TrainerCallback):
    """Add the speed since the last log to each training log."""

    def __init__(self, tokens_per_step: int) -> None:
        self.tokens_per_step = tokens_per_step
        self.mark = (0, time.perf_counter())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self.mark = (state.global_step, time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        """Read the clock."""
        if "loss" in logs:
            (step, then), now = self.mark, time.perf_counter()
            self.mark = (state.global_step, now)
            rate = (state.global_step - step) * self.tokens_per_step / (now - then)
            if state.is_world_process_zero:
                print(f"step {state.global_step}: loss {logs['loss']:.3f}, {rate:,.0f} tokens/s", flush=True)


def read_library(max_characters: int) -> str:
    """Return the standard library's text, printable ASCII only, cut at `max_characters`."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = "".join(path.read_text(encoding="utf-8", errors="ignore") for path in paths)[: 2 * max_characters]
    return "".join(c for c in text if c == "\n" or " " <= c <= "~")[:max_characters]


def main() -> None:
    """Train, evaluate, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/char_language_model")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--precision", default=None)
    parser.add_argument("--strategy", default=None)
    options = parser.parse_args()

    set_seed(0)
    text = read_library(2_000_000)
    alphabet = sorted(set(text))
    codes = {character: code for code, character in enumerate(alphabet)}
    tokens = torch.tensor([codes[character] for character in text])
    length, batch_size = 64, 16
    split = int(0.95 * len(tokens))
    model = GPT(len(alphabet), length=length, num_channels=128, num_heads=4, num_layers=3)
    trainer = Trainer(
        NextCharacter(model),
        TrainingArguments(
            options.output_dir,
            max_steps=options.steps,
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            learning_rate=2e-3,
            warmup_steps=options.steps // 10,
            lr_scheduler_type="cosine",
            weight_decay=0.1,
            logging_steps=max(options.steps // 6, 1),
            save_strategy="no",
            disable_tqdm=True,
        ),
        train_dataset=Windows(tokens[:split], length),
        eval_dataset=Windows(tokens[split : split + 50_000], length),
        strategy=options.strategy,
        precision=options.precision,
    )
    trainer.add_callback(TokensPerSecond(trainer.get_total_train_batch_size(trainer.args) * length))
    result = trainer.train()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        speed = result.metrics["train_samples_per_second"] * length
        print(f"{len(tokens):,} characters; evaluation loss {metrics['eval_loss']:.3f}; {speed:,.0f} tokens/s.")
        prompt = torch.tensor([codes[character] for character in "def "], device=trainer.strategy.device)
        model.eval()
        print("".join(alphabet[code] for code in model.write(prompt, 300).tolist()))


if __name__ == "__main__":
    main()
