"""Summarise or translate with an encoder-decoder, evaluated by what it generates."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import datasets
import numpy
import transformers
from support.script_parts import SPECIAL, WORDS, DataArguments, first, sentences, word_tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    default_data_collator,
    set_seed,
)

SIZE = len(SPECIAL) + len(WORDS)


@dataclasses.dataclass
class GenerationArguments(DataArguments):
    task: str = dataclasses.field(default="summarise", metadata={"help": "summarise or translate."})
    max_source_length: int = 14
    max_target_length: int = 6
    val_max_target_length: int | None = None
    num_beams: int | None = None
    source_prefix: str = "is "
    ignore_pad_token_for_loss: bool = True

    def __post_init__(self) -> None:
        if self.val_max_target_length is None:
            self.val_max_target_length = self.max_target_length


def make_model(task: str):
    if task == "summarise":
        config = transformers.T5Config(
            vocab_size=SIZE, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=3, bos_token_id=2,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config)
    config = transformers.BartConfig(
        vocab_size=SIZE, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=32, dropout=0.0,
        pad_token_id=0, bos_token_id=2, eos_token_id=3, decoder_start_token_id=3, forced_eos_token_id=3,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


def main() -> None:
    parser = HfArgumentParser((GenerationArguments, Seq2SeqTrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = word_tokenizer()
    model = make_model(data_args.task)

    def load(number: int, seed: int) -> datasets.Dataset:
        documents = sentences(number, 9, seed)
        if data_args.task == "summarise":
            return datasets.Dataset.from_dict(
                {"document": documents, "summary": [" ".join(text.split()[::3]) for text in documents]}
            )
        pairs = [{"en": text, "xx": " ".join(text.split()[:4][::-1])} for text in documents]
        return datasets.Dataset.from_dict({"translation": pairs})

    padding = "max_length" if data_args.pad_to_max_length else False

    def preprocess(examples):
        if data_args.task == "summarise":
            inputs, targets = examples["document"], examples["summary"]
        else:
            inputs = [pair["en"] for pair in examples["translation"]]
            targets = [pair["xx"] for pair in examples["translation"]]
        inputs = [data_args.source_prefix + text for text in inputs]
        encoded = tokenizer(inputs, max_length=data_args.max_source_length, padding=padding, truncation=True)
        labels = tokenizer(
            text_target=targets, max_length=data_args.max_target_length, padding=padding, truncation=True
        )["input_ids"]
        if padding and data_args.ignore_pad_token_for_loss:
            labels = [[-100 if token == tokenizer.pad_token_id else token for token in row] for row in labels]
        encoded["labels"] = labels
        return encoded

    raw = {"train": load(16, 0), "validation": load(8, 1), "test": load(4, 2)}
    sets = {name: rows.map(preprocess, batched=True, remove_columns=rows.column_names) for name, rows in raw.items()}
    train_dataset = first(sets["train"], data_args.max_train_samples)
    label_pad_token_id = -100 if data_args.ignore_pad_token_for_loss else tokenizer.pad_token_id
    if data_args.pad_to_max_length:
        collator = default_data_collator
    else:
        collator = DataCollatorForSeq2Seq(
            tokenizer, model=model, label_pad_token_id=label_pad_token_id,
            pad_to_multiple_of=8 if training_args.fp16 else None,
        )  # fmt: skip

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        preds = preds[0] if isinstance(preds, tuple) else preds
        preds = numpy.where(preds != -100, preds, tokenizer.pad_token_id)
        labels = numpy.where(labels != -100, labels, tokenizer.pad_token_id)
        found = tokenizer.batch_decode(preds, skip_special_tokens=True)
        wanted = tokenizer.batch_decode(labels, skip_special_tokens=True)
        shared = [len({*one.split()} & {*two.split()}) for one, two in zip(found, wanted, strict=True)]
        lengths = [numpy.count_nonzero(pred != tokenizer.pad_token_id) for pred in preds]
        return {"rouge": float(numpy.mean(shared)), "gen_len": float(numpy.mean(lengths))}

    training_args.generation_max_length = (
        training_args.generation_max_length
        if training_args.generation_max_length is not None
        else data_args.val_max_target_length
    )
    training_args.generation_num_beams = (
        data_args.num_beams if data_args.num_beams is not None else training_args.generation_num_beams
    )
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=sets["validation"],
        processing_class=tokenizer,
        data_collator=collator,
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        metrics = {**result.metrics, "train_samples": len(train_dataset)}
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        if isinstance(trainer.eval_dataset, dict):
            metrics = {}
            for name, rows in trainer.eval_dataset.items():
                metrics.update(trainer.evaluate(eval_dataset=rows, metric_key_prefix=f"eval_{name}"))
        else:
            metrics = trainer.evaluate(metric_key_prefix="eval")
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if training_args.do_predict:
        result = trainer.predict(sets["test"], metric_key_prefix="predict", max_length=5, num_beams=2)
        trainer.log_metrics("predict", result.metrics)
        trainer.save_metrics("predict", result.metrics)
        if trainer.is_world_process_zero() and training_args.predict_with_generate:
            ids = numpy.where(result.predictions != -100, result.predictions, tokenizer.pad_token_id)
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=True)
            Path(training_args.output_dir, "generated_predictions.txt").write_text("\n".join(texts))
    kwargs = {"finetuned_from": "tiny", "tasks": data_args.task, "language": ["en", "xx"], "dataset": "made up"}
    trainer.create_model_card(**kwargs)


if __name__ == "__main__":
    main()
