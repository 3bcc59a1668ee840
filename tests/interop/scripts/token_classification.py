"""Tag the words of texts, as in named-entity recognition."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy
import transformers
from support.script_parts import DataArguments, first, sentences, sizes, use, word_tokenizer
from transformers import DataCollatorForTokenClassification, HfArgumentParser, Trainer, TrainingArguments, set_seed

NAMES = ["O", "B-VOWEL", "I-VOWEL"]


def load() -> datasets.DatasetDict:
    def make(number: int, seed: int) -> datasets.Dataset:
        tokens = [text.split() for text in sentences(number, 6, seed)]
        tags = [[(word in "aeiou") + (word in "iou") for word in words] for words in tokens]
        features = datasets.Features(
            tokens=datasets.List(datasets.Value("string")), ner_tags=datasets.List(datasets.ClassLabel(names=NAMES))
        )
        return datasets.Dataset.from_dict({"tokens": tokens, "ner_tags": tags}, features=features)

    return datasets.DatasetDict(train=make(16, 0), validation=make(8, 1), test=make(6, 2))


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    raw = load()
    label_list = raw["train"].features["ner_tags"].feature.names
    tokenizer = word_tokenizer()
    model = transformers.BertForTokenClassification(transformers.BertConfig(**sizes(num_labels=len(label_list))))
    model.config.label2id = {name: index for index, name in enumerate(label_list)}
    model.config.id2label = dict(enumerate(label_list))

    def tokenize_and_align(examples):
        tokenized = tokenizer(
            examples["tokens"], is_split_into_words=True, truncation=True, max_length=data_args.max_seq_length,
            padding="max_length" if data_args.pad_to_max_length else False,
        )  # fmt: skip
        tokenized["labels"] = []
        for index, tags in enumerate(examples["ner_tags"]):
            words = tokenized.word_ids(batch_index=index)
            tokenized["labels"].append([-100 if word is None else tags[word] for word in words])
        return tokenized

    train_dataset, eval_dataset, predict_dataset = (
        first(raw[name], number).map(tokenize_and_align, batched=True)
        for name, number in (
            ("train", data_args.max_train_samples),
            ("validation", data_args.max_eval_samples),
            ("test", data_args.max_predict_samples),
        )
    )

    def compute_metrics(p):
        predictions, labels = p
        kept = labels != -100
        return {"accuracy": float((numpy.argmax(predictions, axis=2)[kept] == labels[kept]).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer, pad_to_multiple_of=8),
        compute_metrics=compute_metrics,
    )
    use(trainer, tasks="token-classification")
    if training_args.do_predict:
        predictions, labels, metrics = trainer.predict(predict_dataset, metric_key_prefix="predict")
        trainer.log_metrics("predict", metrics)
        trainer.save_metrics("predict", metrics)
        found = [
            " ".join(label_list[p] for p, kind in zip(row, truth, strict=True) if kind != -100)
            for row, truth in zip(numpy.argmax(predictions, axis=2), labels, strict=True)
        ]
        Path(training_args.output_dir, "predictions.txt").write_text("\n".join(found))


if __name__ == "__main__":
    main()
