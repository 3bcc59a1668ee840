"""What the example scripts of tests/interop/scripts share: tokenizers and pictures made in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy
import torch

WORDS = [*"abcdefghijklmnopqrstuvwxyz", "good", "bad", "who", "is"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@dataclasses.dataclass
class DataArguments:
    """What every example script lets its caller say about the data."""

    max_train_samples: int | None = dataclasses.field(default=None, metadata={"help": "Use only so many to train."})
    max_eval_samples: int | None = dataclasses.field(default=None, metadata={"help": "Use only so many to evaluate."})
    max_predict_samples: int | None = dataclasses.field(default=None, metadata={"help": "Predict only so many."})
    max_seq_length: int = dataclasses.field(default=12, metadata={"help": "Longer samples are cut."})
    pad_to_max_length: bool = dataclasses.field(default=True, metadata={"help": "Pad all samples to that length."})


def word_tokenizer(*, pairs: bool = True) -> Any:
    """Build a tokenizer whose tokens are whole words, with BERT's frame around a text or a pair of texts."""
    import tokenizers
    import transformers

    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *WORDS])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if pairs:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", bos_token="[CLS]", eos_token="[SEP]",
    )  # fmt: skip


def sizes(**options: Any) -> dict[str, Any]:
    """Return the sizes of a tiny BERT-like model, without dropout."""
    return {
        "vocab_size": len(SPECIAL) + len(WORDS), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 16, "max_position_embeddings": 64, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, **options,
    }  # fmt: skip


def sentences(number: int, length: int, seed: int = 0) -> list[str]:
    """Write texts of so many one-letter words each."""
    generator = numpy.random.default_rng(seed)
    return [" ".join(generator.choice(WORDS[:26], length)) for _ in range(number)]


def pictures(number: int, size: int = 16, seed: int = 0) -> list[Any]:
    """Paint RGB pictures with a bright square somewhere."""
    from PIL import Image

    generator = numpy.random.default_rng(seed)
    painted = generator.integers(0, 90, (number, size, size, 3), dtype=numpy.uint8)
    for index, picture in enumerate(painted):
        corner = (index % 2) * size // 2
        picture[corner : corner + size // 2, corner : corner + size // 2] += 120
    return [Image.fromarray(picture) for picture in painted]


def to_tensor(picture: Any) -> torch.Tensor:
    """Turn a picture into channels of numbers about zero."""
    return torch.from_numpy(numpy.array(picture.convert("RGB"))).permute(2, 0, 1).float() / 127.5 - 1


def first(dataset: Any, number: int | None) -> Any:
    """Keep the first samples of a dataset, or all."""
    return dataset if number is None else dataset.select(range(min(len(dataset), number)))


def use(trainer: Any, *, checkpoint: str | None = None, evaluating: Any = None, add: Any = None, **card: Any) -> None:
    """Train and evaluate as the example scripts do, as far as the arguments say.

    Args:
        trainer: What the script made.
        checkpoint: Where training goes on, unless the arguments name another.
        evaluating: Keywords of `evaluate`.
        add: A function that gets an evaluation's metrics and returns further ones.
        card: What the model card says besides.
    """
    args, evaluating = trainer.args, evaluating or {}
    if args.do_train:
        result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or checkpoint)
        metrics = {**result.metrics, "train_samples": len(trainer.train_dataset)}
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if args.do_eval:
        metrics = {**trainer.evaluate(**evaluating), "eval_samples": len(trainer.eval_dataset)}
        metrics |= add(metrics) if add else {}
        split = evaluating.get("metric_key_prefix", "eval")
        trainer.log_metrics(split, metrics)
        trainer.save_metrics(split, metrics)
    kwargs = {"finetuned_from": "tiny", "dataset": "made up", "dataset_tags": "tiny", "language": "en", **card}
    if args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)
