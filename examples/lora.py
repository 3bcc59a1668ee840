"""Fine-tune a language model with LoRA on packed documents: a small Llama that counts up learns to count down.

python examples/lora.py
torchrun --nproc_per_node 2 examples/lora.py
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hftrain import Trainer, TrainingArguments, default_data_collator, pack_dataset, set_seed

NUMBERS = END = 64  # tokens 0 to 63 are numbers, 64 ends a document
ROW = 128


# %% data
def documents(seed: int, num: int, *, down: bool = False) -> list[dict[str, list[int]]]:
    """Return documents that count from a random number up to 63 or down to 0, and end there."""
    rng = random.Random(seed)
    starts = [rng.randrange(NUMBERS) for _ in range(num)]
    return [{"input_ids": [*(range(start, -1, -1) if down else range(start, NUMBERS)), END]} for start in starts]


# %% padding
def padding(rows: list[dict[str, list[int]]]) -> float:
    """Return the share of padding in random batches of 16 documents."""
    lengths = [len(row["input_ids"]) for row in rows]
    batches = [lengths[start : start + 16] for start in range(0, len(lengths), 16)]
    return 1 - sum(lengths) / sum(len(batch) * max(batch) for batch in batches)


texts = documents(0, 2000)
packed = pack_dataset(texts, ROW)
used = sum(len(text["input_ids"]) for text in texts) / (len(packed) * ROW)
print(f"padding: {padding(texts):.0%} in batches of documents, {1 - used:.1%} in {len(packed)} packed rows")


# %% train
def train(model: torch.nn.Module, folder: str, learning_rate: float, *, down: bool = False) -> Trainer:
    """Train on packed documents and save the result."""
    args = TrainingArguments(
        folder,
        num_train_epochs=3,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=16,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(
        model,
        args,
        train_dataset=pack_dataset(documents(0, 2000, down=down), ROW),
        eval_dataset=pack_dataset(documents(1, 100, down=down), ROW),
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint="auto")
    trainer.save_model()
    print(f"{folder}: perplexity {math.exp(trainer.evaluate()['eval_loss']):.3f}")
    return trainer


# %% base
set_seed(42)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
config = LlamaConfig(vocab_size=NUMBERS + 1, max_position_embeddings=ROW, eos_token_id=END, pad_token_id=END, **sizes)
base = LlamaForCausalLM(config)
train(base, "runs/lora/base", 3e-3)


# %% adapters
model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules="all-linear"))
trainable, total = model.get_nb_trainable_parameters()
print(f"LoRA trains {trainable:,} of {total:,} parameters ({trainable / total:.1%}).")
train(model, "runs/lora/adapters", 5e-3, down=True)
for file in Path("runs/lora/adapters").glob("*.safetensors"):
    print(f"saved: {file.name}, {file.stat().st_size / 1e3:.0f} kB")


# %% samples
def go_on(model: PreTrainedModel, start: int) -> list[int]:
    """Return the most likely continuation of a number."""
    prompt = torch.tensor([[start]])
    mask = torch.ones_like(prompt)
    return model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=70, do_sample=False)[0, 1:].tolist()


loaded = LlamaForCausalLM.from_pretrained("runs/lora/base").eval()
print("base after 57:", go_on(loaded, 57))
merged = PeftModel.from_pretrained(loaded, "runs/lora/adapters").merge_and_unload()  # a plain LlamaForCausalLM again
print("merged after 6:", go_on(merged, 6))
