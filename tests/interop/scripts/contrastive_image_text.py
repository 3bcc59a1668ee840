"""Bring pictures and texts together (CLIP): the model has a loss when it is asked to, and no labels."""

from __future__ import annotations

import datasets
import torch
import transformers
from support.script_parts import DataArguments, first, pictures, sentences, sizes, to_tensor, use, word_tokenizer
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


def collate_fn(examples):
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
        "input_ids": torch.tensor([example["input_ids"] for example in examples], dtype=torch.long),
        "attention_mask": torch.tensor([example["attention_mask"] for example in examples], dtype=torch.long),
        "return_loss": True,
    }


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    training_args.remove_unused_columns = False
    set_seed(training_args.seed)
    tokenizer = word_tokenizer()
    size = {name: value for name, value in sizes().items() if name not in ("vocab_size", "max_position_embeddings")}
    model = transformers.VisionTextDualEncoderModel(
        vision_model=transformers.ViTModel(transformers.ViTConfig(**size, image_size=16, patch_size=8)),
        text_model=transformers.BertModel(transformers.BertConfig(**sizes())),
        config=transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
            transformers.ViTConfig(**size, image_size=16, patch_size=8),
            transformers.BertConfig(**sizes()),
            projection_dim=8,
        ),
    )
    for parameter in model.vision_model.embeddings.parameters():
        parameter.requires_grad = False

    def load(number: int, seed: int) -> datasets.Dataset:
        texts = sentences(number, 4, seed)
        return datasets.Dataset.from_dict({"image": pictures(number, seed=seed), "caption": texts})

    def tokenize_captions(examples):
        return tokenizer(
            list(examples["caption"]), max_length=data_args.max_seq_length, padding="max_length", truncation=True
        )

    def transform_images(examples):
        examples["pixel_values"] = [to_tensor(image) for image in examples["image"]]
        return examples

    sets = []
    for number, seed, kept in ((16, 0, data_args.max_train_samples), (8, 1, data_args.max_eval_samples)):
        rows = first(load(number, seed), kept).map(tokenize_captions, batched=True, remove_columns=["caption"])
        rows.set_transform(transform_images)
        sets.append(rows)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=sets[0] if training_args.do_train else None,
        eval_dataset=sets[1] if training_args.do_eval else None,
        data_collator=collate_fn,
    )
    use(trainer, tasks="contrastive-image-text-modeling")
    tokenizer.save_pretrained(training_args.output_dir)


if __name__ == "__main__":
    main()
