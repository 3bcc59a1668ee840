"""Measure the memory that a chunked loss and selective checkpointing save, with Llamas on a CPU.

    python benchmarks/large_vocabulary.py           # both tables, a minute

The first table is what a training of two steps adds to the peak of its process, with a vocabulary of 128,256 words and
1,024 tokens, and its time. The second is what a forward pass leaves allocated for the backward pass, by torch's
profiler, with four layers of width 256 and 2,048 tokens, and the time of the backward pass.
"""

from __future__ import annotations

import logging
import resource
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import transformers

from hftrain import ChunkedCrossEntropy, Trainer, TrainingArguments
from hftrain.extras.recompute import recompute_activations


def make_model(**size: int) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, use_cache=False, **size)
    return transformers.LlamaForCausalLM(config)


def train(kind: str) -> None:
    """Print what a training adds to the peak of this process."""
    model = make_model(vocab_size=128256, num_hidden_layers=2, intermediate_size=512)
    rows = [{"input_ids": (words := torch.randint(128256, (1024,))), "labels": words} for _ in range(2)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(folder, max_steps=2, per_device_train_batch_size=1, optim="sgd", use_cpu=True)
        args.report_to, args.save_strategy, args.disable_tqdm = [], "no", True
        callbacks = [ChunkedCrossEntropy()] if kind == "chunked" else []
        trainer = Trainer(model, args, train_dataset=rows, callbacks=callbacks)
        before, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        trainer.train()
    added = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"loss {kind:8} {added:8.0f} MiB {time.perf_counter() - start_s:8.2f} s")


def recompute(kind: str) -> None:
    """Print what a forward pass leaves allocated, and the time of the backward pass."""
    model = make_model(vocab_size=1000, num_hidden_layers=4, intermediate_size=1024).train()
    if kind != "off":
        selective = kind if kind == "op" else int(kind)
        recompute_activations(model, {"selective": selective, "layer_classes": ["LlamaDecoderLayer"]})
    words = torch.randint(1000, (4, 512))
    for _ in range(2):  # the first pass makes caches
        with torch.profiler.profile(profile_memory=True) as profile:
            loss = model(input_ids=words, labels=words).loss
        start_s = time.perf_counter()
        loss.backward()
    memory = sum(event.self_cpu_memory_usage for event in profile.key_averages()) / 2**20
    print(f"selective {kind:3} {memory:8.0f} MiB {time.perf_counter() - start_s:8.2f} s")


def main() -> None:
    logging.disable(logging.WARNING)
    if len(sys.argv) > 2:
        return {"train": train, "recompute": recompute}[sys.argv[1]](sys.argv[2])
    cases = [*(("train", kind) for kind in ("plain", "chunked")), *(("recompute", k) for k in ("off", "op", "2", "1"))]
    for case in cases:
        output = subprocess.run([sys.executable, __file__, *case], check=True, capture_output=True, text=True).stdout
        print(output.splitlines()[-1])
    return None


if __name__ == "__main__":
    main()
