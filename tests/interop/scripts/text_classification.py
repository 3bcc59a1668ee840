"""Classify texts, score them (regression) or tag them with several classes, in the style of GLUE."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from pathlib import Path

import datasets
import numpy
import transformers
from support.script_parts import DataArguments, first, sentences, sizes, word_tokenizer
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class TaskArguments(DataArguments):
    task_name: str = dataclasses.field(default="classify", metadata={"help": "classify, regress or tag."})
    mismatched: bool = dataclasses.field(default=False, metadata={"help": "Evaluate on a second set too."})

    def __post_init__(self) -> None:
        if self.task_name not in ("classify", "regress", "tag"):
            raise ValueError(f"Unknown task: {self.task_name}")


def load(task: str) -> datasets.DatasetDict:
    def make(number: int, seed: int) -> datasets.Dataset:
        one, two = sentences(number, 4, seed), sentences(number, 4, seed + 100)
        kinds = [text.count("a") + ord(text[0]) % 3 for text in one]
        label = {
            "classify": [kind % 3 for kind in kinds],
            "regress": [kind / 3 for kind in kinds],
            "tag": [[float(kind % 2), float(kind > 1), float(kind > 2)] for kind in kinds],
        }[task]
        return datasets.Dataset.from_dict({"sentence1": one, "sentence2": two, "label": label, "idx": [*range(number)]})

    return datasets.DatasetDict(train=make(24, 0), validation=make(8, 1), other=make(8, 2), test=make(10, 3))


def main() -> None:
    data_args, training_args = HfArgumentParser((TaskArguments, TrainingArguments)).parse_args_into_dataclasses()
    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", handlers=[logging.StreamHandler(sys.stdout)]
    )
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    transformers.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.enable_default_handler()
    transformers.utils.logging.enable_explicit_format()
    logger.warning(
        f"Process rank: {training_args.local_process_index}, device: {training_args.device}, "
        f"n_gpu: {training_args.n_gpu}, distributed: {training_args.parallel_mode.value == 'distributed'}, "
        f"16-bits training: {training_args.fp16}"
    )
    logger.info(f"Training/evaluation parameters {training_args}")

    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
    set_seed(training_args.seed)

    raw = load(data_args.task_name)
    num_labels = 1 if data_args.task_name == "regress" else 3
    kinds = {"classify": "single_label_classification", "regress": "regression", "tag": "multi_label_classification"}
    config = transformers.BertConfig(**sizes(num_labels=num_labels, problem_type=kinds[data_args.task_name]))
    tokenizer = word_tokenizer()
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    if data_args.task_name == "classify":
        model.config.label2id = {f"kind {index}": index for index in range(3)}
        model.config.id2label = {index: name for name, index in model.config.label2id.items()}
    padding = "max_length" if data_args.pad_to_max_length else False

    def preprocess(examples):
        pairs = (examples["sentence1"], examples["sentence2"])
        return tokenizer(*pairs, padding=padding, max_length=data_args.max_seq_length, truncation=True)

    with training_args.main_process_first(desc="dataset map pre-processing"):
        raw = raw.map(preprocess, batched=True, desc="Running tokenizer on dataset")
    train_dataset = first(raw["train"], data_args.max_train_samples)
    eval_dataset = first(raw["validation"], data_args.max_eval_samples)
    predict_dataset = first(raw["test"], data_args.max_predict_samples)

    def compute_metrics(p: EvalPrediction):
        preds = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        if data_args.task_name == "regress":
            return {"mse": float(((numpy.squeeze(preds) - p.label_ids) ** 2).mean())}
        if data_args.task_name == "tag":
            return {"share": float(((preds > 0) == (p.label_ids > 0.5)).mean())}
        return {"accuracy": float((preds.argmax(axis=1) == p.label_ids).mean())}

    if data_args.pad_to_max_length:
        data_collator = default_data_collator
    else:
        data_collator = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8 if training_args.fp16 else None)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=data_collator,
    )

    if training_args.do_train:
        checkpoint = last_checkpoint
        if training_args.resume_from_checkpoint is not None:
            checkpoint = training_args.resume_from_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        metrics = train_result.metrics
        metrics["train_samples"] = len(train_dataset)
        trainer.save_model()
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()

    if training_args.do_eval:
        logger.info("*** Evaluate ***")
        tasks, sets, combined = [data_args.task_name], [eval_dataset], {}
        if data_args.mismatched:
            tasks, sets = [*tasks, f"{data_args.task_name}-mm"], [*sets, raw["other"]]
        for eval_set, task in zip(sets, tasks, strict=True):
            metrics = trainer.evaluate(eval_dataset=eval_set)
            metrics["eval_samples"] = len(eval_set)
            if task.endswith("-mm"):
                kept = [name for name in metrics if "time" not in name and "second" not in name]
                metrics = {name + "_mm": metrics[name] for name in kept}
            combined.update(metrics)
            trainer.log_metrics("eval", metrics)
            trainer.save_metrics("eval", combined)

    if training_args.do_predict:
        predict_dataset = predict_dataset.remove_columns("label")
        predictions = trainer.predict(predict_dataset, metric_key_prefix="predict").predictions
        if data_args.task_name == "classify":
            predictions = numpy.argmax(predictions, axis=1)
        elif data_args.task_name == "regress":
            predictions = numpy.squeeze(predictions).round(3)
        else:
            predictions = (predictions > 0).tolist()
        if trainer.is_world_process_zero():
            lines = [f"{index}\t{item}\n" for index, item in enumerate(predictions)]
            Path(training_args.output_dir, "predict_results.txt").write_text("index\tprediction\n" + "".join(lines))

    kwargs = {"finetuned_from": "tiny-bert", "tasks": "text-classification", "language": "en", "dataset_tags": "glue"}
    kwargs |= {"dataset_args": data_args.task_name, "dataset": f"GLUE {data_args.task_name.upper()}"}
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)


if __name__ == "__main__":
    main()
