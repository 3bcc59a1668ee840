"""Tokenizers, models and texts that the scripts share; all are made here, none is downloaded."""

from __future__ import annotations

import os
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, TrainerCallback

TEXT = "the a cat dog bird fish sees likes hates big small red blue green runs swims flies today not very"
WORDS = TEXT.split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TEMPLATE = (
    "{% for message in messages %}{{ '[CLS] ' + message['role'] + ' ' + message['content'] + ' [SEP] ' }}{% endfor %}"
)


def tokenizer(*, max_length: int = 32, is_causal: bool = False, **tokens: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of whole words, with the special tokens of BERT, or an end of text for a language model."""
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, "user", "assistant", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    if is_causal:
        names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    else:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
        names["mask_token"] = "[MASK]"
    made = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=max_length, **{**names, **tokens})
    made.chat_template = TEMPLATE
    return made


def sentences(count: int, *, seed: int, low: int = 3, high: int = 8) -> list[str]:
    """Return made-up sentences of unequal lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high + 1, (count,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator).tolist()) for n in lengths]


def num_to_evaluate(alone: int) -> int:
    """Return how many samples to evaluate: on several processes, so many that transformers repeats none."""
    return 16 if "RANK" in os.environ else alone


def bert_config(**more: Any) -> Any:
    """Return the config of a tiny BERT."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(SPECIAL) + 2 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=128,
        **{"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, **more},
    )


def lora(**more: Any) -> dict[str, Any]:
    """Return the argument of TRL's trainers that has them train adapters."""
    from peft import LoraConfig

    settings = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **more}
    return {"peft_config": LoraConfig(**settings)}


def llama(*, seed: int = 0) -> Any:
    """Return a tiny Llama, loaded from a folder: some trainers load it again, as their reference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    LlamaForCausalLM(llama_config(LlamaConfig)).save_pretrained("llama")
    tokenizer(is_causal=True).save_pretrained("llama")
    return LlamaForCausalLM.from_pretrained("llama", dtype=torch.float32)


def llama_config(kind: Any, **more: Any) -> Any:
    """Return the config of a tiny Llama."""
    return kind(
        vocab_size=len(SPECIAL) + 2 + len(WORDS),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        **more,
    )


class SeedEachStep(TrainerCallback):
    """Seed torch before each step, so that dropout and generated answers are the same with both Trainers.

    transformers' loaders draw a number from torch's global generator for each pass; hftrain's leave it alone, so that
    how often somebody evaluates does not change the training.
    """

    seeds = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Seed with the number of the step."""
        if self.seeds:
            torch.manual_seed(1000 + state.global_step)


class StopAfter(TrainerCallback):
    """Stop the training after a number of steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ask for the stop."""
        if state.global_step == self.steps:
            control.should_training_stop = True


def fit(trainer: Any) -> Any:
    """Train, and return what an evaluation reports."""
    trainer.train()
    return trainer.evaluate()


# What every client's arguments have in common: a few steps, logged one by one, with evaluations and checkpoints.
ARGUMENTS: dict[str, Any] = {
    "max_steps": 6,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "eval_strategy": "steps",
    "eval_steps": 3,
    "save_strategy": "steps",
    "save_steps": 3,
    "report_to": "none",
    "use_cpu": True,
    "seed": 11,
    "disable_tqdm": True,
}
