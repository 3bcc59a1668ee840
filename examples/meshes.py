"""Train a Llama on one mesh, go on from its checkpoint on others, and compare the gradients with one process.

python examples/meshes.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hftrain import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, launch, set_seed
from hftrain.strategies import create

STEPS, HALF, BEGUN = 20, 10, "fsdp_tp"
# Processes and sizes. A checkpoint is saved once, whatever the mesh, and loads on any other.
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "single": (1, {}), "ddp": (2, {}), "tp": (2, {}), "cp": (2, {}), "pp": (2, {}), BEGUN: (4, {"tp_size": 2}),
}  # fmt: skip


class Stop(TrainerCallback):
    """Save and stop half-way, as a run does whose time is over."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == HALF:
            control.should_save = control.should_training_stop = True


def train(name: str, folder: str, resume: str | None = None) -> list[float]:
    """Train, in float64, and return the norm of the gradients in each step; every process runs this."""
    set_seed(0)
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **width)).double()
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (64, 12))]
    strategy = create(name, use_cpu=True, **MESHES[name][1])
    # As many samples a step on every mesh: ranks that share a model read the same ones.
    args = TrainingArguments(
        folder, max_steps=STEPS, logging_steps=1, save_steps=1000,
        per_device_train_batch_size=8 // strategy.data.world_size, learning_rate=1e-2, use_cpu=True, report_to="none",
        disable_tqdm=True,
    )  # fmt: skip
    callbacks = [Stop()] if name == BEGUN else []
    trainer = Trainer(model, args, train_dataset=rows, strategy=strategy, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]


def main() -> None:
    """Train on one process; then half-way on four, from whose checkpoint each other mesh goes on."""
    with tempfile.TemporaryDirectory() as folder:
        alone = train("single", f"{folder}/alone")
        launch(train, BEGUN, f"{folder}/begun", num_processes=MESHES[BEGUN][0])
        for name in [*MESHES][:-1]:
            checkpoint = f"{folder}/begun/checkpoint-{HALF}"
            norms = launch(train, name, f"{folder}/{name}", checkpoint, num_processes=MESHES[name][0])[0]
            apart = max(abs(norm - other) for norm, other in zip(norms, alone, strict=True))
            print(f"{BEGUN} to step {HALF}, {name} to step {STEPS}: gradients differ from one process by {apart:.0e}")


if __name__ == "__main__":
    main()
