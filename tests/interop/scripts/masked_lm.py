"""Train a masked language model line by line, or one on permuted texts (XLNet)."""

from __future__ import annotations

import dataclasses
import math

import datasets
import torch
import transformers
from support.script_parts import SPECIAL, WORDS, DataArguments, first, sentences, sizes, use, word_tokenizer
from transformers import DataCollatorForLanguageModeling, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclasses.dataclass
class MaskingArguments(DataArguments):
    mlm_probability: float = dataclasses.field(default=0.3, metadata={"help": "Share of tokens to mask."})
    fixed_masks: bool = dataclasses.field(default=True, metadata={"help": "Mask a batch the same way each time."})
    objective: str = dataclasses.field(default="mask", metadata={"help": "mask or permute."})


def repeatable(collator):
    """Let what a collator draws depend on the batch and on nothing else."""

    def collate(rows):
        with torch.random.fork_rng():
            torch.manual_seed(sum(index * token for row in rows for index, token in enumerate(row["input_ids"])))
            return collator(rows)

    return collate


def main() -> None:
    data_args, training_args = HfArgumentParser((MaskingArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = word_tokenizer()
    raw = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict({"text": sentences(16, 10, 0)}),
            "validation": datasets.Dataset.from_dict({"text": sentences(8, 10, 1)}),
        }
    )

    def tokenize(examples):
        lines = [line for line in examples["text"] if line]
        return tokenizer(lines, padding="max_length", truncation=True, max_length=12, return_special_tokens_mask=True)

    tokenized = raw.map(tokenize, batched=True, remove_columns=["text"], desc="Tokenizing line by line")
    if data_args.objective == "permute":
        config = transformers.XLNetConfig(
            vocab_size=len(SPECIAL) + len(WORDS), d_model=16, n_layer=2, n_head=2, d_inner=16, dropout=0.0
        )
        model = transformers.XLNetLMHeadModel(config)
        collator = transformers.DataCollatorForPermutationLanguageModeling(tokenizer, plm_probability=0.3)
        tokenized = tokenized.remove_columns(["special_tokens_mask", "attention_mask"])
    else:
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes()))
        theirs = transformers.DataCollatorForLanguageModeling
        kind = theirs if data_args.fixed_masks else DataCollatorForLanguageModeling
        collator = kind(tokenizer=tokenizer, mlm_probability=data_args.mlm_probability)

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        kept = labels != -100
        return {"accuracy": float((preds[kept] == labels[kept]).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=first(tokenized["train"], data_args.max_train_samples),
        eval_dataset=first(tokenized["validation"], data_args.max_eval_samples),
        processing_class=tokenizer,
        data_collator=repeatable(collator) if data_args.fixed_masks else collator,
        compute_metrics=compute_metrics if data_args.objective != "permute" else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if data_args.objective != "permute" else None,
    )
    use(trainer, tasks="fill-mask", add=lambda metrics: {"perplexity": math.exp(metrics["eval_loss"])})


if __name__ == "__main__":
    main()
