"""TRL's trainers on texts and rewards, on a tiny Llama: whole, with packed texts, and with LoRA."""

from __future__ import annotations

from typing import Any

import torch
from datasets import Dataset
from scripts.parts import ARGUMENTS, fit, llama, llama_config, lora, num_to_evaluate, sentences, tokenizer

SETTINGS = {**ARGUMENTS, "bf16": False, "max_length": 24}


def texts(count: int, *, seed: int) -> Dataset:
    """Return texts."""
    return Dataset.from_dict({"text": sentences(count, seed=seed)})


def answers(count: int, *, seed: int) -> Dataset:
    """Return prompts with one answer each."""
    return Dataset.from_dict(
        {"prompt": [text + " " for text in sentences(count, seed=seed)], "completion": sentences(count, seed=seed + 1)}
    )


def pairs(count: int, *, seed: int) -> Dataset:
    """Return prompts with a better and a worse answer."""
    return Dataset.from_dict(
        {
            "prompt": [text + " " for text in sentences(count, seed=seed)],
            "chosen": sentences(count, seed=seed + 1),
            "rejected": sentences(count, seed=seed + 2),
        }
    )


def judged(count: int, *, seed: int) -> Dataset:
    """Return prompts with an answer each, good or bad."""
    made = answers(count, seed=seed)
    return made.add_column("label", [i % 2 == 0 for i in range(count)])


def chats(count: int, *, seed: int) -> Dataset:
    """Return conversations of two messages."""
    asked, answered = sentences(count, seed=seed), sentences(count, seed=seed + 1)
    both = zip(asked, answered, strict=True)
    return Dataset.from_list(
        [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in both]
    )


def steps(count: int, *, seed: int) -> Dataset:
    """Return answers in two steps, each right or wrong."""
    parts = zip(*(sentences(count, seed=seed + n) for n in range(3)), strict=True)
    return Dataset.from_list(
        [
            {"prompt": a + " ", "completions": [b + " ", c + " "], "labels": [i % 2 == 0, i % 3 == 0]}
            for i, (a, b, c) in enumerate(parts)
        ]
    )


def trained(
    kind: Any, config: Any, folder: str, data: Any, *, model: Any = None, more: Any = None, **settings: Any
) -> Any:
    """Train with one of TRL's trainers and return what an evaluation reports."""
    # The model before the arguments, which form the process group: transformers saves on the main process then.
    model = llama() if model is None else model
    return fit(
        kind(
            model=model,
            args=config(folder, **{**SETTINGS, **settings}),
            train_dataset=data(30, seed=1),
            eval_dataset=data(num_to_evaluate(9), seed=11),
            processing_class=tokenizer(is_causal=True),
            **(more or {}),
        )
    )


def scoring(kind: str) -> Any:
    """Return a tiny Llama that scores texts, or their tokens."""
    import transformers

    torch.manual_seed(0)
    count = {"SequenceClassification": 1, "TokenClassification": 2}[kind]
    return getattr(transformers, f"LlamaFor{kind}")(llama_config(transformers.LlamaConfig, num_labels=count))


def sft(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on texts."""
    from trl import SFTConfig, SFTTrainer

    return trained(SFTTrainer, SFTConfig, folder, texts, **{"max_length": 16, **settings})


def sft_answers(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on answers; labels of the prompts are left out."""
    from trl import SFTConfig, SFTTrainer

    return trained(SFTTrainer, SFTConfig, folder, answers, completion_only_loss=True, **settings)


def sft_packing(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on packed texts, which need a batch without padding."""
    return sft(folder, packing=True, per_device_train_batch_size=1, **settings)


def sft_lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters on texts."""
    from trl import SFTConfig, SFTTrainer

    return trained(SFTTrainer, SFTConfig, folder, texts, more=lora(), **settings)


def dpo(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on pairs of answers."""
    from trl import DPOConfig, DPOTrainer

    return trained(DPOTrainer, DPOConfig, folder, pairs, **settings)


def dpo_lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters on pairs of answers."""
    from trl import DPOConfig, DPOTrainer

    return trained(DPOTrainer, DPOConfig, folder, pairs, more=lora(), **settings)


def kto(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on single answers."""
    from trl import KTOConfig, KTOTrainer

    return trained(KTOTrainer, KTOConfig, folder, judged, **settings)


def kto_lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters on single answers."""
    from trl import KTOConfig, KTOTrainer

    return trained(KTOTrainer, KTOConfig, folder, judged, more=lora(), **settings)


def orpo(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on pairs of answers without a reference."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return trained(ORPOTrainer, ORPOConfig, folder, pairs, **settings)


def cpo(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on pairs of answers without a reference."""
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return trained(CPOTrainer, CPOConfig, folder, pairs, **settings)


def gkd(folder: str, **settings: Any) -> dict[str, Any]:
    """Distil a teacher on conversations."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    teacher = {"teacher_model": llama(seed=1)}
    return trained(GKDTrainer, GKDConfig, folder, chats, more=teacher, lmbda=0.0, max_new_tokens=4, **settings)


def reward(folder: str, **settings: Any) -> dict[str, Any]:
    """Train a model of rewards on pairs of answers."""
    from trl import RewardConfig, RewardTrainer

    model = scoring("SequenceClassification")
    return trained(RewardTrainer, RewardConfig, folder, pairs, model=model, **settings)


def reward_lora(folder: str, **settings: Any) -> dict[str, Any]:
    """Train adapters of a model of rewards."""
    from trl import RewardConfig, RewardTrainer

    model, more = scoring("SequenceClassification"), lora(task_type="SEQ_CLS", modules_to_save=["score"])
    return trained(RewardTrainer, RewardConfig, folder, pairs, model=model, more=more, **settings)


def prm(folder: str, **settings: Any) -> dict[str, Any]:
    """Train a model of rewards for each step of an answer."""
    from trl.experimental.prm import PRMConfig, PRMTrainer

    return trained(PRMTrainer, PRMConfig, folder, steps, model=scoring("TokenClassification"), **settings)


def bco(folder: str, **settings: Any) -> dict[str, Any]:
    """Train on single answers."""
    from trl.experimental.bco import BCOConfig, BCOTrainer

    return trained(BCOTrainer, BCOConfig, folder, judged, **settings)
