"""sentence-transformers: SparseEncoderTrainer, whose loss has parts that are logged by their names."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, bert_config, fit, sentences, tokenizer


def pairs(count: int, seed: int) -> Dataset:
    """Return pairs of sentences that belong together."""
    return Dataset.from_dict({"query": sentences(count, seed=seed), "passage": sentences(count, seed=seed + 1)})


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train SPLADE on pairs."""
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder import SparseEncoderTrainer, SparseEncoderTrainingArguments
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling
    from transformers import BertForMaskedLM

    BertForMaskedLM(bert_config()).save_pretrained("bert")
    tokenizer().save_pretrained("bert")
    model = SparseEncoder(modules=[MLMTransformer("bert", max_seq_length=16), SpladePooling()], device="cpu")
    args = SparseEncoderTrainingArguments(folder, **{**ARGUMENTS, **settings})
    loss = SpladeLoss(
        model,
        SparseMultipleNegativesRankingLoss(model),
        document_regularizer_weight=3e-3,
        query_regularizer_weight=5e-3,
    )
    trainer = SparseEncoderTrainer(
        model=model,
        args=args,
        train_dataset=pairs(26, 1),
        eval_dataset=pairs(10, 3),
        loss=loss,
        callbacks=[SeedEachStep()],
    )
    return fit(trainer)
