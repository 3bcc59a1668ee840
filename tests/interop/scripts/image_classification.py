"""Classify pictures, which are made into tensors when they are read."""

from __future__ import annotations

import datasets
import numpy
import torch
import transformers
from support.script_parts import DataArguments, first, pictures, sizes, to_tensor, use
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

NAMES = ["left", "right"]


def load(number: int, seed: int) -> datasets.Dataset:
    features = datasets.Features(image=datasets.Image(), label=datasets.ClassLabel(names=NAMES))
    rows = {"image": pictures(number, seed=seed), "label": [index % 2 for index in range(number)]}
    return datasets.Dataset.from_dict(rows, features=features)


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    # The model takes no picture, yet the transform that is applied later needs it.
    training_args.remove_unused_columns = False
    set_seed(training_args.seed)
    dataset = datasets.DatasetDict(train=load(16, 0), validation=load(8, 1))
    labels = dataset["train"].features["label"].names
    size = {name: value for name, value in sizes().items() if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(
        **size, image_size=16, patch_size=8, num_labels=len(labels),
        label2id={name: str(index) for index, name in enumerate(labels)},
        id2label={str(index): name for index, name in enumerate(labels)},
    )  # fmt: skip
    model = transformers.AutoModelForImageClassification.from_config(config)

    def collate_fn(examples):
        pixel_values = torch.stack([example["pixel_values"] for example in examples])
        return {"pixel_values": pixel_values, "labels": torch.tensor([example["label"] for example in examples])}

    def transforms(batch):
        batch["pixel_values"] = [to_tensor(image) for image in batch["image"]]
        return batch

    train_dataset = first(dataset["train"].shuffle(seed=training_args.seed), data_args.max_train_samples)
    train_dataset.set_transform(transforms)
    eval_dataset = first(dataset["validation"], data_args.max_eval_samples)
    eval_dataset.set_transform(transforms)

    def compute_metrics(p):
        return {"accuracy": float((numpy.argmax(p.predictions, axis=1) == p.label_ids).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        compute_metrics=compute_metrics,
        data_collator=collate_fn,
    )
    use(trainer, finetuned_from="tiny-vit", tasks="image-classification", dataset="beans", tags=["vision"])


if __name__ == "__main__":
    main()
