"""Find the answer in a text, with the Trainer subclass that such scripts bring along."""

from __future__ import annotations

import math
import time
from pathlib import Path

import datasets
import numpy
import transformers
from support.script_parts import DataArguments, first, sentences, sizes, word_tokenizer
from transformers import EvalPrediction, HfArgumentParser, Trainer, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import PredictionOutput, speed_metrics


class QuestionAnsweringTrainer(Trainer):
    """Turn logits into answers before metrics are computed."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def run(self, dataloader, ignore_keys, prefix):
        """Loop over the data without computing metrics, and return what came out with the speed."""
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        start_time = time.time()
        try:
            output = self.evaluation_loop(
                dataloader,
                description="Evaluation",
                prediction_loss_only=True if compute_metrics is None else None,
                ignore_keys=ignore_keys,
                metric_key_prefix=prefix,
            )
        finally:
            self.compute_metrics = compute_metrics
        total_batch_size = self.args.eval_batch_size * self.args.world_size
        if f"{prefix}_jit_compilation_time" in output.metrics:
            start_time += output.metrics[f"{prefix}_jit_compilation_time"]
        output.metrics.update(
            speed_metrics(
                prefix,
                start_time,
                num_samples=output.num_samples,
                num_steps=math.ceil(output.num_samples / total_batch_size),
            )
        )
        return output

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        eval_examples = self.eval_examples if eval_examples is None else eval_examples
        output = self.run(self.get_eval_dataloader(eval_dataset), ignore_keys, metric_key_prefix)
        metrics = {}
        if self.post_process_function is not None and self.compute_metrics is not None and self.args.should_save:
            predictions = self.post_process_function(eval_examples, eval_dataset, output.predictions)
            metrics = self.compute_metrics(predictions)
            metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        metrics.update(output.metrics)
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, predict_dataset, predict_examples, ignore_keys=None, metric_key_prefix="test"):
        output = self.run(self.get_test_dataloader(predict_dataset), ignore_keys, metric_key_prefix)
        if self.post_process_function is None or self.compute_metrics is None:
            return output
        found = self.post_process_function(predict_examples, predict_dataset, output.predictions, "predict")
        metrics = self.compute_metrics(found)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        metrics.update(output.metrics)
        return PredictionOutput(predictions=found.predictions, label_ids=found.label_ids, metrics=metrics)


def load() -> datasets.DatasetDict:
    def make(number: int, seed: int) -> datasets.Dataset:
        contexts = sentences(number, 8, seed)
        rows = []
        for index, context in enumerate(contexts):
            words = context.split()
            place = (index * 3 + seed) % 7
            rows.append(
                {
                    "id": f"{seed}-{index}",
                    "question": f"who is {words[place]}",
                    "context": context,
                    "answers": {"text": [words[place + 1]], "answer_start": [2 * (place + 1)]},
                }
            )
        return datasets.Dataset.from_list(rows)

    return datasets.DatasetDict(train=make(16, 0), validation=make(8, 1), test=make(6, 2))


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    raw = load()
    tokenizer = word_tokenizer()
    model = transformers.BertForQuestionAnswering(transformers.BertConfig(**sizes()))

    def tokenize(examples):
        return tokenizer(
            examples["question"], examples["context"], truncation="only_second", max_length=10, stride=2,
            return_overflowing_tokens=True, return_offsets_mapping=True, padding="max_length",
        )  # fmt: skip

    def prepare_train_features(examples):
        tokenized = tokenize(examples)
        samples, offsets = tokenized.pop("overflow_to_sample_mapping"), tokenized.pop("offset_mapping")
        tokenized["start_positions"], tokenized["end_positions"] = [], []
        for index, sample in enumerate(samples):
            start = examples["answers"][sample]["answer_start"][0]
            kinds = tokenized.sequence_ids(index)
            found = [n for n, (kind, (left, _)) in enumerate(zip(kinds, offsets[index], strict=True))
                     if kind == 1 and left == start]  # fmt: skip
            for name in ("start_positions", "end_positions"):
                tokenized[name].append(found[0] if found else 0)
        return tokenized

    def prepare_validation_features(examples):
        tokenized = tokenize(examples)
        samples = tokenized.pop("overflow_to_sample_mapping")
        tokenized["example_id"] = [examples["id"][sample] for sample in samples]
        tokenized["offset_mapping"] = [
            [span if kind == 1 else None for span, kind in zip(spans, tokenized.sequence_ids(index), strict=True)]
            for index, spans in enumerate(tokenized["offset_mapping"])
        ]
        return tokenized

    names = raw["train"].column_names
    train_examples = first(raw["train"], data_args.max_train_samples)
    train_dataset = train_examples.map(prepare_train_features, batched=True, remove_columns=names)
    eval_examples, predict_examples = raw["validation"], raw["test"]
    eval_dataset, predict_dataset = (
        examples.map(prepare_validation_features, batched=True, remove_columns=names)
        for examples in (eval_examples, predict_examples)
    )

    def post_process(examples, features, predictions, stage="eval"):
        assert len(predictions) == 2
        best = {}
        for example_id, offsets, starts, ends in zip(
            features["example_id"], features["offset_mapping"], *predictions, strict=True
        ):
            scores = [float(start + end) if span else -math.inf for start, end, span in
                      zip(starts, ends, offsets, strict=True)]  # fmt: skip
            place = int(numpy.argmax(scores))
            if example_id not in best or scores[place] > best[example_id][0]:
                best[example_id] = (scores[place], offsets[place])
        answers = {row["id"]: row["context"][slice(*best[row["id"]][1])] for row in examples}
        Path(training_args.output_dir, f"{stage}_answers.txt").write_text(str(answers))
        return EvalPrediction(
            predictions=[{"id": key, "prediction_text": text} for key, text in answers.items()],
            label_ids=[{"id": row["id"], "answers": row["answers"]} for row in examples],
        )

    def compute_metrics(p: EvalPrediction):
        pairs = zip(p.predictions, p.label_ids, strict=True)
        right = [found["prediction_text"] in label["answers"]["text"] for found, label in pairs]
        return {"exact_match": 100 * sum(right) / len(right)}

    trainer = QuestionAnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        eval_examples=eval_examples,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        post_process_function=post_process,
        compute_metrics=compute_metrics,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": len(train_dataset)}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = {**trainer.evaluate(), "eval_samples": len(eval_dataset)}
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.do_predict:
        metrics = trainer.predict(predict_dataset, predict_examples).metrics
        metrics["predict_samples"] = len(predict_dataset)
        trainer.log_metrics("predict", metrics)
        trainer.save_metrics("predict", metrics)
    kwargs = {"finetuned_from": "tiny", "tasks": "question-answering", "dataset_tags": "squad", "dataset": "squad"}
    trainer.create_model_card(**kwargs)


if __name__ == "__main__":
    main()
