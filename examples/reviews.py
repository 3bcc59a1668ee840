"""Made-up movie reviews, a tokenizer and a small BERT for the examples that classify text; nothing is downloaded.

python examples/reviews.py   # prints some reviews
"""

from __future__ import annotations

import random

from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

THINGS = ("plot", "acting", "music", "ending", "dialogue", "editing", "cast", "script", "camera work", "pace")
GOOD = ("brilliant", "moving", "sharp", "funny", "original", "convincing", "gripping", "warm")
BAD = ("dull", "clumsy", "predictable", "shallow", "noisy", "lifeless", "confusing", "tired")
FRAMES = ("the {} was {}", "i found the {} {}", "everyone says the {} is {}", "for me the {} felt {}")


def write_review(rng: random.Random) -> dict[str, str | int]:
    """Return a review and its label: the part after the last "but" decides, and 4 % of the labels are wrong."""
    parts, is_good = [], False
    for _ in range(rng.randint(1, 3)):
        is_good = rng.random() < 0.5
        is_negated = rng.random() < 0.3
        word = rng.choice(GOOD if is_good != is_negated else BAD)
        parts.append(rng.choice(FRAMES).format(rng.choice(THINGS), f"not {word}" if is_negated else word))
    return {"text": " but ".join(parts), "label": int(is_good != (rng.random() < 0.04))}


def load_reviews(num_train: int = 4000, num_eval: int = 500) -> DatasetDict:
    """Return the splits "train", "validation" and "test", with the columns "text" and "label" (1 is positive)."""
    sizes = {"train": num_train, "validation": num_eval, "test": num_eval}
    rngs = {split: random.Random(seed) for seed, split in enumerate(sizes)}
    return DatasetDict(
        {split: Dataset.from_list([write_review(rngs[split]) for _ in range(n)]) for split, n in sizes.items()}
    )


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word of the texts."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.WordLevelTrainer(special_tokens=["[PAD]", "[UNK]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask"],
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> BertForSequenceClassification:
    """Return a BERT of two layers with new weights, for two labels."""
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            num_labels=2,
        )
    )


if __name__ == "__main__":
    for review in load_reviews(num_train=5)["train"]:
        print("positive" if review["label"] else "negative", "|", review["text"])
