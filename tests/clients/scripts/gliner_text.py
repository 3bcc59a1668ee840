"""gliner: its Trainer for named entities with open classes."""

from __future__ import annotations

from typing import Any

import torch
from scripts.parts import ARGUMENTS, SeedEachStep, bert_config, fit, sentences, tokenizer

NAMES = {"cat", "dog", "bird", "fish"}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return words with the spans of names."""
    words = [text.split() for text in sentences(count, seed=seed)]
    return [
        {"tokenized_text": row, "ner": [[i, i, "animal"] for i, word in enumerate(row) if word in NAMES]}
        for row in words
    ]


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on words with spans."""
    from gliner import GLiNER, GLiNERConfig
    from gliner.data_processing.collator import SpanDataCollator
    from gliner.training import Trainer, TrainingArguments
    from transformers import BertModel

    torch.manual_seed(0)
    BertModel(bert_config()).save_pretrained("bert")
    tokenizer(max_length=64).save_pretrained("bert")
    config = GLiNERConfig(model_name="bert", hidden_size=16, max_width=3, max_len=32, fine_tune=True, dropout=0.1)
    model = GLiNER.from_config(config)
    args = TrainingArguments(folder, **{**ARGUMENTS, **settings}, others_lr=5e-3)
    # gliner asks for it, and transformers 5 has no such argument.
    args.save_safetensors = True
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows(24, 1),
        eval_dataset=rows(8, 2),
        data_collator=SpanDataCollator(model.config, data_processor=model.data_processor, prepare_labels=True),
        processing_class=model.data_processor.transformer_tokenizer,
        callbacks=[SeedEachStep()],
    )
    return fit(trainer)
