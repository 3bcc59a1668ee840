"""Fine-tune a causal language model with LoRA: a small Llama that counts up learns to count down.

python examples/lora.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hftrain import Trainer, TrainingArguments, set_seed

NUM_NUMBERS = 64
LENGTH = 12


def count(step: int, num_samples: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return sequences that count up or down (`step` is 1 or -1) from a random number, modulo 64."""
    starts = torch.randint(NUM_NUMBERS, (num_samples, 1), generator=torch.Generator().manual_seed(seed))
    rows = (starts + step * torch.arange(LENGTH)) % NUM_NUMBERS
    return [{"input_ids": row, "labels": row} for row in rows]


def train(model: torch.nn.Module, output_dir: Path, step: int, epochs: float, learning_rate: float) -> Trainer:
    """Train on 2,000 sequences and evaluate on 200 others; save the result in `output_dir`."""
    args = TrainingArguments(
        str(output_dir),
        num_train_epochs=epochs,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=100,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        logging_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        report_to="none",
    )
    data = {"train_dataset": count(step, 2000, seed=1), "eval_dataset": count(step, 200, seed=2)}
    trainer = Trainer(model, args, **data)
    trainer.train()
    trainer.save_model()
    return trainer


def go_on(model: PreTrainedModel | PeftModel, *numbers: int) -> list[int]:
    """Return the six most likely numbers after some others."""
    prompt = torch.tensor([numbers])
    return model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)[0, len(numbers) :].tolist()


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/lora"))
    parser.add_argument("--epochs", type=float, default=4)
    return parser.parse_args()


def main() -> None:
    """Train a base model, adapt it with LoRA, then load and merge the adapters."""
    options = parse()
    set_seed(42)
    base_dir, adapter_dir = options.output_dir / "base", options.output_dir / "adapters"
    # With a real model, leave this training out: LlamaForCausalLM.from_pretrained("meta-llama/Llama-3.2-1B")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=NUM_NUMBERS, pad_token_id=None, eos_token_id=None, **sizes))
    train(base, base_dir, step=1, epochs=options.epochs, learning_rate=3e-3)
    print("base model after 5, 6, 7:", go_on(base.eval(), 5, 6, 7))

    config = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear")
    model = get_peft_model(base, config)
    trainable, total = model.get_nb_trainable_parameters()
    print(f"LoRA trains {trainable:,} of {total:,} parameters ({trainable / total:.1%}).")
    train(model, adapter_dir, step=-1, epochs=options.epochs, learning_rate=1e-2)
    for file in sorted(adapter_dir.glob("*.safetensors")):
        print(f"saved: {file.name}, {file.stat().st_size / 1e3:.0f} kB")

    adapted = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base_dir), adapter_dir)
    merged = adapted.merge_and_unload()  # a plain LlamaForCausalLM again
    print("merged model after 7, 6, 5:", go_on(merged.eval(), 7, 6, 5))


if __name__ == "__main__":
    main()
