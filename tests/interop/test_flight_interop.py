"""`hftrain blame` on a transformers model: the text of a sample is decoded with the tokenizer that the run saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from support.tiny import make_arguments
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hftrain import FlightLog, Trainer, set_seed
from hftrain.cli.blame import show_blame

pytestmark = pytest.mark.interop
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "looked", "at", "my", "dog", "who", "ran", "off"]


def sample_losses(outputs: Any, batch: Any) -> torch.Tensor:
    logits, labels = outputs.logits[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").mean(1)


def test_text_is_decoded(tmp_path: Path) -> None:
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(["?", *WORDS])}, unk_token="?"))
    made.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="?")
    texts = ["the cat sat on a mat and looked at my dog"] * 120
    texts[50] = "dog dog at the the mat sat my my and cat"
    rows = [{**tokenizer(text), "labels": tokenizer(text)["input_ids"]} for text in texts]
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    args = make_arguments(
        tmp_path, num_train_epochs=2, per_device_train_batch_size=2, learning_rate=1e-2, save_strategy="epoch",
        train_sampling_strategy="sequential",
    )  # fmt: skip
    log = FlightLog(sample_losses=sample_losses)
    Trainer(model, args, train_dataset=rows, processing_class=tokenizer, flight_log=log).train()
    answer = show_blame(str(tmp_path))
    assert [each["sample"] for each in answer.data["suspects"]] == [50]
    assert f"'{texts[50]}' (11 tokens)" in "\n".join(answer)
