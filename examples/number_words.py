"""Read numbers written in words: "seven hundred twelve" becomes 712, digit by digit.

    python examples/number_words.py
    python examples/number_words.py --steps 100
    torchrun --nproc_per_node 2 examples/number_words.py

The data and a small encoder-decoder are made in this file. Every evaluation lets the model generate, and compares what
it wrote with the digits.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from hftrain import EvalPrediction, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

# Shapes in names: B batch, S words read, T digits written, V vocabulary, C channel.

ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
PAD, END = 0, 1
WORDS = {word: code for code, word in enumerate(["<pad>", "<end>", *ONES, *TENS, "hundred", "thousand"])}
DIGITS = {digit: code for code, digit in enumerate("0123456789", start=2)}


class Tokenizer:
    """Tells the Trainer which token pads."""

    pad_token_id = PAD


def in_words(number: int) -> list[str]:
    """Write a number below a million in words."""
    if number < 20:
        return [ONES[number]]
    for size, name in ((1000, "thousand"), (100, "hundred")):
        if number >= size:
            rest = in_words(number % size) if number % size else []
            return [*in_words(number // size), name, *rest]
    return [TENS[number // 10 - 2], *([ONES[number % 10]] if number % 10 else [])]


def make_sample(number: int) -> dict[str, list[int]]:
    """Return a number's words and its digits as token ids, each with the end."""
    words = [WORDS[word] for word in in_words(number)]
    return {"input_ids": [*words, END], "labels": [*(DIGITS[digit] for digit in str(number)), END]}


def draw_numbers(count: int, *, seed: int) -> list[int]:
    """Draw different numbers, each length as often as there are such numbers to draw."""
    generator = random.Random(seed)
    numbers: set[int] = set(range(100))
    while len(numbers) < count:
        numbers.add(generator.randrange(10 ** generator.choice([3, 4, 5, 6, 6])))
    drawn = sorted(numbers)
    generator.shuffle(drawn)
    return drawn


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad the samples to the longest: the words with PAD, the labels with -100, which no loss counts."""
    return {
        name: pad_sequence([torch.tensor(each[name]) for each in samples], batch_first=True, padding_value=padding)
        for name, padding in (("input_ids", PAD), ("labels", -100))
    }


class Reader(nn.Module):
    """A recurrent encoder, and a recurrent decoder that attends to it."""

    def __init__(self, num_channels: int = 96) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), num_channels, padding_idx=PAD)
        self.digits = nn.Embedding(2 + len(DIGITS), num_channels)
        self.encoder = nn.GRU(num_channels, num_channels, batch_first=True, bidirectional=True)
        self.decoder = nn.GRU(num_channels, 2 * num_channels, batch_first=True)
        self.output = nn.Linear(4 * num_channels, 2 + len(DIGITS))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss of each next digit, given the digits before it."""
        before_BT = torch.cat([torch.full_like(labels[:, :1], PAD), labels[:, :-1].clamp(min=PAD)], dim=1)
        logits_BTV, _ = self.write(before_BT, None, *self.read(input_ids))
        return {"loss": nn.functional.cross_entropy(logits_BTV.flatten(0, 1), labels.flatten()), "logits": logits_BTV}

    def read(self, input_ids_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode the words; tell which of them are there."""
        return self.encoder(self.words(input_ids_BS))[0], input_ids_BS != PAD

    def write(
        self, before_BT: torch.Tensor, state: torch.Tensor | None, read_BSC: torch.Tensor, is_word_BS: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of each next digit, and the decoder's state."""
        wrote_BTC, state = self.decoder(self.digits(before_BT), state)
        found_BTC = nn.functional.scaled_dot_product_attention(
            wrote_BTC, read_BSC, read_BSC, attn_mask=is_word_BS[:, None, :]
        )
        return self.output(torch.cat([wrote_BTC, found_BTC], dim=-1)), state

    def generate(self, input_ids: torch.Tensor, max_length: int = 16) -> torch.Tensor:
        """Write the likeliest digit after the other, until every sample has come to its end."""
        read, state = self.read(input_ids), None
        last_B1 = torch.full_like(input_ids[:, :1], PAD)
        is_done_B1 = torch.zeros_like(last_B1, dtype=torch.bool)
        written = []
        while len(written) < max_length and not is_done_B1.all():
            logits_B1V, state = self.write(last_B1, state, *read)
            last_B1 = logits_B1V.argmax(dim=-1).masked_fill(is_done_B1, PAD)
            is_done_B1 = is_done_B1 | (last_B1 == END)
            written.append(last_B1)
        return torch.cat(written, dim=1)


def as_text(tokens: Any) -> str:
    """Read token ids up to the end."""
    codes = {code: digit for digit, code in DIGITS.items()}
    row = tokens.tolist()
    return "".join(codes.get(code, "?") for code in row[: row.index(END) if END in row else len(row)])


def compute_metrics(prediction: EvalPrediction) -> dict[str, float]:
    """Count the numbers of which every digit is right."""
    pairs = zip(prediction.predictions, prediction.label_ids, strict=True)
    right = [as_text(written) == as_text(labels) for written, labels in pairs]
    return {"accuracy": sum(right) / len(right)}


def main() -> None:
    """Train, evaluate, and read some numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", default="runs/number_words")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()

    set_seed(0)
    start_s = time.perf_counter()
    samples = [make_sample(number) for number in draw_numbers(21_000, seed=0)]
    trainer = Seq2SeqTrainer(
        Reader(),
        Seq2SeqTrainingArguments(
            options.output_dir,
            max_steps=options.steps,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=250,
            learning_rate=4e-3,
            warmup_steps=options.steps // 20,
            lr_scheduler_type="cosine",
            eval_strategy="steps",
            eval_steps=max(options.steps // 3, 1),
            logging_steps=max(options.steps // 6, 1),
            save_strategy="no",
            predict_with_generate=True,
            generation_max_length=8,
            disable_tqdm=True,
        ),
        data_collator=collate,
        train_dataset=samples[:20_000],
        eval_dataset=samples[20_000:],
        processing_class=Tokenizer(),
        compute_metrics=compute_metrics,
    )
    trainer.train()
    metrics = trainer.evaluate()
    numbers = [7, 40, 712, 2026, 90_017, 123_456]
    written = trainer.predict([make_sample(number) for number in numbers], max_length=10).predictions
    if trainer.is_world_process_zero():
        for number, tokens in zip(numbers, written, strict=True):
            print(f"{' '.join(in_words(number))}: {as_text(tokens)}")
        print(f"accuracy {metrics['eval_accuracy']:.1%} on numbers never seen, {time.perf_counter() - start_s:.0f} s")


if __name__ == "__main__":
    main()
