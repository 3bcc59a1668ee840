"""Find objects: labels are a list of dicts, and predictions of batches are not joined."""

from __future__ import annotations

import datasets
import torch
import transformers
from support.script_parts import DataArguments, first, pictures, sizes, to_tensor, use
from transformers import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed


def load(number: int, seed: int) -> datasets.Dataset:
    rows = []
    for index, image in enumerate(pictures(number, seed=seed)):
        boxes = [[0.25 + 0.5 * (index % 2)] * 2 + [0.5, 0.5], [0.5, 0.5, 1.0, 1.0]][: 1 + index % 3 % 2]
        objects = {"bbox": boxes, "category": [index % 2, 2][: len(boxes)], "area": [64.0, 256.0][: len(boxes)]}
        rows.append({"image_id": index, "image": image, "objects": objects})
    return datasets.Dataset.from_list(rows)


def transform_batch(examples):
    result = {"pixel_values": [to_tensor(image) for image in examples["image"]], "labels": []}
    for image_id, objects in zip(examples["image_id"], examples["objects"], strict=True):
        result["labels"].append(
            {
                "image_id": torch.tensor([image_id]),
                "class_labels": torch.tensor(objects["category"]),
                "boxes": torch.tensor(objects["bbox"]),
                "area": torch.tensor(objects["area"]),
                "orig_size": torch.tensor([16, 16]),
            }
        )
    return result


def collate_fn(batch):
    return {
        "pixel_values": torch.stack([row["pixel_values"] for row in batch]),
        "labels": [row["labels"] for row in batch],
    }


@torch.no_grad()
def compute_metrics(evaluation_results: EvalPrediction) -> dict[str, float]:
    predictions, targets = evaluation_results.predictions, evaluation_results.label_ids
    sizes_seen, right, count = [], 0.0, 0
    for batch in targets:
        sizes_seen += [tuple(target["orig_size"].tolist()) for target in batch]
    for batch, truth in zip(predictions, targets, strict=True):
        logits, boxes = batch[1], batch[2]
        assert boxes.shape[-1] == 4
        assert len(logits) == len(truth)
        for one, target in zip(torch.as_tensor(logits), truth, strict=True):
            best = int(one.softmax(-1)[:, :-1].max(-1).values.argmax())
            right += int(one[best, :-1].argmax()) in target["class_labels"].tolist()
            count += 1
    assert set(sizes_seen) == {(16, 16)}
    return {"right": right / count, "images": count}


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    training_args.remove_unused_columns = False
    training_args.eval_do_concat_batches = False
    set_seed(training_args.seed)
    size = {name: value for name, value in sizes().items() if name not in ("vocab_size", "max_position_embeddings")}
    config = transformers.YolosConfig(
        **size,
        image_size=[16, 16],
        patch_size=8,
        num_detection_tokens=4,
        num_labels=3,
        use_mid_position_embeddings=False,
    )
    model = transformers.YolosForObjectDetection(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=first(load(16, 0), data_args.max_train_samples).with_transform(transform_batch),
        eval_dataset=first(load(8, 1), data_args.max_eval_samples).with_transform(transform_batch),
        data_collator=collate_fn,
        compute_metrics=compute_metrics,
    )
    test = {"eval_dataset": trainer.eval_dataset, "metric_key_prefix": "test"}
    use(trainer, evaluating=test, finetuned_from="tiny-yolos", tags=["object-detection", "vision"])


if __name__ == "__main__":
    main()
