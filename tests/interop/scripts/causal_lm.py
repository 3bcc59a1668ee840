"""Train a causal language model on texts that are joined and cut into blocks; with LoRA if asked."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from itertools import chain

import datasets
import transformers
from support.script_parts import SPECIAL, WORDS, DataArguments, first, sentences, word_tokenizer
from transformers import HfArgumentParser, Trainer, TrainingArguments, default_data_collator, set_seed
from transformers.trainer_utils import get_last_checkpoint

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class LanguageArguments(DataArguments):
    block_size: int = dataclasses.field(default=8, metadata={"help": "Tokens in a sample."})
    use_lora: bool = dataclasses.field(default=False, metadata={"help": "Train low-rank adapters only."})
    streaming: bool = dataclasses.field(default=False, metadata={"help": "Read the data as a stream."})


def make_model(use_lora: bool):
    config = transformers.LlamaConfig(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32, pad_token_id=0, bos_token_id=2,
        eos_token_id=3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    if use_lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        )
        model.print_trainable_parameters()
    return model


def main() -> None:
    data_args, training_args = HfArgumentParser((LanguageArguments, TrainingArguments)).parse_args_into_dataclasses()
    last_checkpoint = None
    if os.path.isdir(training_args.output_dir) and training_args.do_train:
        last_checkpoint = get_last_checkpoint(training_args.output_dir)
        if last_checkpoint is not None and training_args.resume_from_checkpoint is None:
            logger.info(f"Checkpoint detected, resuming training at {last_checkpoint}.")
    set_seed(training_args.seed)
    raw = datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict({"text": sentences(30, 6, 0)}),
            "validation": datasets.Dataset.from_dict({"text": sentences(11, 6, 1)}),
        }
    )
    tokenizer = word_tokenizer(pairs=False)
    model = make_model(data_args.use_lora)
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))

    def group_texts(examples):
        joined = {name: list(chain(*examples[name])) for name in examples}
        total = len(joined["input_ids"]) // data_args.block_size * data_args.block_size
        blocks = range(0, total, data_args.block_size)
        result = {name: [ids[at : at + data_args.block_size] for at in blocks] for name, ids in joined.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    with training_args.main_process_first(desc="dataset map tokenization"):
        tokenized = raw.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=["text"])
        tokenized = tokenized.map(group_texts, batched=True)
    train_dataset = first(tokenized["train"], data_args.max_train_samples)
    eval_dataset = first(tokenized["validation"], data_args.max_eval_samples)
    num_train = len(train_dataset)
    if data_args.streaming:
        train_dataset = train_dataset.to_iterable_dataset()

    def preprocess_logits_for_metrics(logits, labels):
        # Models may return more than logits, such as the cache.
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        return {"accuracy": float((preds[:, :-1].reshape(-1) == labels[:, 1:].reshape(-1)).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset if training_args.do_train else None,
        eval_dataset=eval_dataset if training_args.do_eval else None,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics if training_args.do_eval else None,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics if training_args.do_eval else None,
    )
    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        metrics = result.metrics
        metrics["train_samples"] = num_train
        trainer.log_metrics("train", metrics)
        trainer.save_metrics("train", metrics)
        trainer.save_state()
    if training_args.do_eval:
        metrics = trainer.evaluate()
        metrics["eval_samples"] = len(eval_dataset)
        metrics["perplexity"] = math.exp(metrics["eval_loss"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    kwargs = {
        "finetuned_from": "tiny-llama",
        "tasks": "text-generation",
        "dataset_tags": "made-up",
        "dataset": "made up",
    }
    if training_args.push_to_hub:
        trainer.push_to_hub(**kwargs)
    else:
        trainer.create_model_card(**kwargs)


if __name__ == "__main__":
    main()
