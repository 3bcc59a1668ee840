"""sentence-transformers: SentenceTransformerTrainer, with an evaluator and a loss with weights of its own."""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from scripts.parts import ARGUMENTS, SeedEachStep, bert_config, sentences, tokenizer


def backbone() -> Any:
    """Return a sentence encoder over a tiny BERT."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import BertModel

    BertModel(bert_config()).save_pretrained("bert")
    tokenizer().save_pretrained("bert")
    words = Transformer("bert", max_seq_length=16)
    return SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension())], device="cpu")


def pairs(count: int, seed: int) -> Dataset:
    """Return pairs of sentences with one of three labels."""
    left, right = sentences(count, seed=seed), sentences(count, seed=seed + 1)
    return Dataset.from_dict(
        {"premise": left, "hypothesis": right, "label": [len(text) % 3 for text in left]},
    )


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on pairs with labels; evaluate with the loss and with an evaluator."""
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
    from sentence_transformers.sentence_transformer.losses import SoftmaxLoss

    model = backbone()
    loss = SoftmaxLoss(model, model.get_embedding_dimension(), num_labels=3)
    args = SentenceTransformerTrainingArguments(folder, **{**ARGUMENTS, **settings}, max_grad_norm=0.5)
    evaluator = EmbeddingSimilarityEvaluator(
        sentences(12, seed=5), sentences(12, seed=6), [i / 12 for i in range(12)], name="made-up"
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=pairs(26, 1),
        eval_dataset=pairs(10, 3),
        loss=loss,
        evaluator=evaluator,
        callbacks=[SeedEachStep()],
    )
    trainer.train()
    trainer.trained_module = loss
    trainer.save_model(f"{folder}/final")
    return trainer.evaluate()
