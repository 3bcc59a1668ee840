"""Choose how a text goes on, out of four endings."""

from __future__ import annotations

from itertools import chain

import datasets
import numpy
import transformers
from support.script_parts import DataArguments, first, sentences, sizes, use, word_tokenizer
from transformers import (
    DataCollatorForMultipleChoice,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


def load(number: int, seed: int) -> datasets.Dataset:
    rows = [
        {
            "video-id": str(index),
            "sent1": text,
            "sent2": "who",
            **{
                f"ending{choice}": text.split()[choice] + (" good" if choice == index % 4 else " bad")
                for choice in range(4)
            },
            "label": index % 4,
        }
        for index, text in enumerate(sentences(number, 4, seed))
    ]
    return datasets.Dataset.from_list(rows)


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = word_tokenizer()
    model = transformers.BertForMultipleChoice(transformers.BertConfig(**sizes()))
    endings = [f"ending{choice}" for choice in range(4)]

    def preprocess(examples):
        firsts = list(chain(*([context] * 4 for context in examples["sent1"])))
        seconds = list(
            chain(
                *(
                    [f"{header} {examples[end][index]}" for end in endings]
                    for index, header in enumerate(examples["sent2"])
                )
            )
        )
        encoded = tokenizer(
            firsts, seconds, truncation=True, max_length=data_args.max_seq_length,
            padding="max_length" if data_args.pad_to_max_length else False,
        )  # fmt: skip
        return {name: [ids[at : at + 4] for at in range(0, len(ids), 4)] for name, ids in encoded.items()}

    train_dataset = first(load(16, 0).map(preprocess, batched=True), data_args.max_train_samples)
    eval_dataset = first(load(8, 1).map(preprocess, batched=True), data_args.max_eval_samples)

    def compute_metrics(eval_predictions):
        predictions, label_ids = eval_predictions
        return {"accuracy": (numpy.argmax(predictions, axis=1) == label_ids).astype(numpy.float32).mean().item()}

    if data_args.pad_to_max_length:
        collator = default_data_collator
    else:
        collator = DataCollatorForMultipleChoice(tokenizer=tokenizer)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=compute_metrics,
    )
    use(trainer, tasks="multiple-choice")


if __name__ == "__main__":
    main()
