"""Pre-train on masked pictures: SimMIM, where the data is masked, and MAE, where the model masks and has no labels."""

from __future__ import annotations

import dataclasses

import datasets
import torch
import transformers
from support.script_parts import DataArguments, first, pictures, sizes, to_tensor, use
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclasses.dataclass
class ImageArguments(DataArguments):
    method: str = dataclasses.field(default="simmim", metadata={"help": "simmim or mae."})
    mask_ratio: float = dataclasses.field(default=0.5, metadata={"help": "Share of patches to hide."})


@dataclasses.dataclass
class CustomTrainingArguments(TrainingArguments):
    base_learning_rate: float = dataclasses.field(
        default=1e-2, metadata={"help": "The learning rate for 256 samples a step; it grows with their number."}
    )


def make_model(method: str, mask_ratio: float):
    size = {name: value for name, value in sizes().items() if name not in ("vocab_size", "max_position_embeddings")}
    if method == "simmim":
        return transformers.ViTForMaskedImageModeling(
            transformers.ViTConfig(**size, image_size=16, patch_size=4, encoder_stride=4)
        )
    config = transformers.ViTMAEConfig(
        **size, image_size=16, patch_size=4, decoder_hidden_size=16, decoder_num_hidden_layers=1,
        decoder_num_attention_heads=2, decoder_intermediate_size=16, mask_ratio=mask_ratio, norm_pix_loss=True,
    )  # fmt: skip
    return transformers.ViTMAEForPreTraining(config)


def main() -> None:
    data_args, training_args = HfArgumentParser((ImageArguments, CustomTrainingArguments)).parse_args_into_dataclasses()
    training_args.remove_unused_columns = False
    set_seed(training_args.seed)
    model = make_model(data_args.method, data_args.mask_ratio)

    def load(number: int, seed: int) -> datasets.Dataset:
        rows = {"image": pictures(number, seed=seed), "position": [*range(number)]}
        return datasets.Dataset.from_dict(rows, features=datasets.Features(
            image=datasets.Image(), position=datasets.Value("int64")
        ))  # fmt: skip

    def preprocess_images(examples):
        examples["pixel_values"] = [to_tensor(image) for image in examples["image"]]
        order = [torch.randperm(16, generator=torch.Generator().manual_seed(at)) for at in examples["position"]]
        examples["mask"] = [(one < 16 * data_args.mask_ratio).long() for one in order]
        # What decides which patches MAE hides; the model would draw it.
        examples["noise"] = [one / 16 for one in order]
        return examples

    def collate_fn(examples):
        batch = {"pixel_values": torch.stack([example["pixel_values"] for example in examples])}
        if data_args.method == "simmim":
            batch["bool_masked_pos"] = torch.stack([example["mask"] for example in examples])
        else:
            batch["noise"] = torch.stack([example["noise"] for example in examples])
        return batch

    train_dataset, eval_dataset = first(load(16, 0), data_args.max_train_samples), load(8, 1)
    train_dataset.set_transform(preprocess_images)
    eval_dataset.set_transform(preprocess_images)
    if data_args.method == "mae":
        total = training_args.train_batch_size * training_args.gradient_accumulation_steps * training_args.world_size
        training_args.learning_rate = training_args.base_learning_rate * total / 256
        # Otherwise the model's evaluation has no loss: no column looks like labels.
        training_args.label_names = ["pixel_values"]
    else:
        training_args.label_names = ["bool_masked_pos"]
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        data_collator=collate_fn,
    )
    use(trainer, tasks="masked-auto-encoding")


if __name__ == "__main__":
    main()
