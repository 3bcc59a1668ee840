"""Name the kind of each pixel."""

from __future__ import annotations

from functools import partial

import datasets
import numpy
import torch
import transformers
from support.script_parts import DataArguments, first, pictures, to_tensor, use
from transformers import HfArgumentParser, Trainer, TrainingArguments, default_data_collator, set_seed


def mean_iou(predictions, labels, *, num_labels: int, ignore_index: int) -> dict[str, float]:
    shares = {}
    kept = labels != ignore_index
    for kind in range(num_labels):
        mine, theirs = (predictions == kind) & kept, (labels == kind) & kept
        shares[f"iou_{kind}"] = float((mine & theirs).sum() / max(1, (mine | theirs).sum()))
    return {"mean_iou": float(numpy.mean(list(shares.values()))), **shares}


def load(number: int, seed: int) -> datasets.Dataset:
    images = pictures(number, size=32, seed=seed)
    masks = [(numpy.array(image).min(axis=-1) > 119).astype(int) for image in images]
    for mask in masks:
        mask[0] = 255  # the border counts for nothing
    return datasets.Dataset.from_dict({"image": images, "label": [mask.tolist() for mask in masks]})


def preprocess(batch, labels_name: str = "labels"):
    return {
        "pixel_values": [to_tensor(image) for image in batch["image"]],
        labels_name: [torch.tensor(mask) for mask in batch["label"]],
    }


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    training_args.remove_unused_columns = False
    set_seed(training_args.seed)
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], patch_sizes=[7, 3], strides=[4, 2],
        num_attention_heads=[1, 2], mlp_ratios=[1, 1], decoder_hidden_size=16, num_labels=2, drop_path_rate=0.0,
        hidden_dropout_prob=0.0, classifier_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        semantic_loss_ignore_index=255,
    )  # fmt: skip
    model = transformers.SegformerForSemanticSegmentation(config)

    @torch.no_grad()
    def compute_metrics(eval_pred):
        logits, labels = eval_pred
        scaled = torch.nn.functional.interpolate(
            torch.from_numpy(logits), size=labels.shape[-2:], mode="bilinear", align_corners=False
        )
        return mean_iou(scaled.argmax(dim=1).numpy(), labels, num_labels=2, ignore_index=255)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=first(load(16, 0), data_args.max_train_samples).with_transform(preprocess),
        eval_dataset=first(load(8, 1), data_args.max_eval_samples).with_transform(partial(preprocess)),
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
    )
    use(trainer, tasks="image-segmentation")


if __name__ == "__main__":
    main()
