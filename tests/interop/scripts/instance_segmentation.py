"""Find instances by their masks: two columns of labels, lists of tensors, and metrics that are gathered by batches."""

from __future__ import annotations

import datasets
import numpy
import torch
import transformers
from support.script_parts import DataArguments, first, pictures, to_tensor, use
from transformers import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, set_seed


def load(number: int, seed: int) -> datasets.Dataset:
    images = pictures(number, size=32, seed=seed)
    masks = [(numpy.array(image).min(axis=-1) > 119).astype(int).tolist() for image in images]
    return datasets.Dataset.from_dict({"image": images, "annotation": masks})


def transform_batch(examples):
    batch = {"pixel_values": [to_tensor(image) for image in examples["image"]], "mask_labels": [], "class_labels": []}
    for annotation in examples["annotation"]:
        mask = torch.tensor(annotation)
        kinds = sorted(set(mask.flatten().tolist()))
        batch["mask_labels"].append(torch.stack([(mask == kind).float() for kind in kinds]))
        batch["class_labels"].append(torch.tensor(kinds))
    return batch


def collate_fn(examples):
    batch = {name: [example[name] for example in examples] for name in ("class_labels", "mask_labels")}
    batch["pixel_values"] = torch.stack([example["pixel_values"] for example in examples])
    return batch


class Evaluator:
    """Count, batch by batch, how often the first query names a class that is there."""

    def __init__(self) -> None:
        self.right, self.count = 0, 0

    @torch.no_grad()
    def __call__(self, evaluation_results: EvalPrediction, compute_result: bool = False):
        class_logits, mask_logits = evaluation_results.predictions[:2]
        mask_labels, class_labels = evaluation_results.label_ids
        assert isinstance(class_logits, torch.Tensor)
        assert mask_logits.shape[0] == len(mask_labels)
        for logits, kinds in zip(class_logits, class_labels, strict=True):
            self.right += int(logits[0, :-1].argmax()) in kinds.tolist()
            self.count += 1
        if not compute_result:
            return None
        result = {"right": self.right / self.count, "images": self.count}
        self.right, self.count = 0, 0
        return result


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    training_args.eval_do_concat_batches = False
    training_args.batch_eval_metrics = True
    training_args.remove_unused_columns = False
    set_seed(training_args.seed)
    config = transformers.MaskFormerConfig(
        backbone_config=transformers.SwinConfig(
            image_size=32, patch_size=2, embed_dim=8, depths=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], window_size=2,
            hidden_dropout_prob=0.0, drop_path_rate=0.0, out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        decoder_config=transformers.DetrConfig(
            d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=4, dropout=0.0,
        ),
        fpn_feature_size=32, mask_feature_size=16, num_labels=2,
    )  # fmt: skip
    model = transformers.MaskFormerForInstanceSegmentation(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=first(load(8, 0), data_args.max_train_samples).with_transform(transform_batch),
        eval_dataset=first(load(8, 1), data_args.max_eval_samples).with_transform(transform_batch),
        data_collator=collate_fn,
        compute_metrics=Evaluator(),
    )
    use(trainer, tasks="image-segmentation")


if __name__ == "__main__":
    main()
