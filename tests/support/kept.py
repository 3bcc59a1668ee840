"""Checkpoints of an earlier version, in `tests/kept`: today's code must load them and end with the same weights.

`python tests/support/kept.py NAME...` writes them again, which only a new feature or format calls for.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from support.distributed import launch
from support.tiny import Net, Task, make_arguments, make_resumable, make_rows, on_tensor_ranks

from hftrain import EMA, Mixture, StepOutput, TaskModule, Trainer, set_seed

KEPT = Path(__file__).parents[1] / "kept"
# In the middle of the second of two passes of six updates.
STEP, MAX_STEPS = 8, 12


class TwoOptimizers(TaskModule):
    """A network whose first and last layers have optimizers of their own, which take turns."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__(Net(dropout=0.2))

    def configure_optimizers(self) -> Any:
        first, last = self.model.layers[0].parameters(), self.model.layers[4].parameters()
        return {"first": torch.optim.Adam(first, lr=0.02), "last": torch.optim.SGD(last, lr=0.1, momentum=0.9)}

    def training_step(self, batch: Any) -> Any:
        first, last = self.optimizers["first"], self.optimizers["last"]
        loss = self.model(**batch)[0]
        (first if first.num_updates == last.num_updates else last).minimize(loss)
        return StepOutput(loss=loss.detach())


def _plain(folder: Path) -> Trainer:
    return make_resumable(folder, save_steps=STEP)


def _task(folder: Path) -> Trainer:
    return make_resumable(
        folder, model=Task(dropout=0.2), save_steps=STEP, gradient_accumulation_steps=2, num_train_epochs=4
    )


def _average(folder: Path) -> Trainer:
    return make_resumable(folder, EMA(0.9), save_steps=STEP)


def _optimizers(folder: Path) -> Trainer:
    return make_resumable(folder, model=TwoOptimizers(), save_steps=STEP)


def _mixture(folder: Path) -> Trainer:
    mixture = Mixture({"web": (make_rows(13, seed=3), 0.6), "code": (make_rows(9, seed=4), 0.4)}, epoch_size=22)
    return make_resumable(folder, train_dataset=mixture, save_steps=STEP)


def _adapters(folder: Path) -> Trainer:
    import peft

    set_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["layers.0", "layers.4"], lora_dropout=0.1)
    return make_resumable(folder, model=peft.get_peft_model(Net(dropout=0.2), config), save_steps=STEP)


def _gpt2() -> Any:
    import transformers

    set_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def _texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(16, (8,), generator=generator) for _ in range(22)]
    return [{"input_ids": row, "labels": row} for row in rows]


def _transformers(folder: Path) -> Trainer:
    """Train a model of transformers; its Trainer wrote the checkpoint that is kept."""
    set_seed(1)
    return Trainer(_gpt2(), make_arguments(folder, save_strategy="steps", save_steps=STEP), train_dataset=_texts())


def _fsdp(folder: Path) -> Trainer:
    return make_resumable(folder, strategy="fsdp", per_device_train_batch_size=2, save_steps=STEP)


def _tp(folder: Path) -> Trainer:
    return make_resumable(folder, strategy=on_tensor_ranks(), save_steps=STEP)


RUNS: dict[str, Callable[[Path], Trainer]] = {
    "plain": _plain,
    "task": _task,
    "average": _average,
    "optimizers": _optimizers,
    "mixture": _mixture,
    "adapters": _adapters,
    "transformers": _transformers,
    "fsdp": _fsdp,
    "tp": _tp,
}
NUM_PROCESSES = {"fsdp": 2, "tp": 2}


def resume(name: str, folder: str) -> None:
    """Resume a kept checkpoint, and raise where the weights at the end differ from those kept."""
    trainer = RUNS[name](Path(folder))
    trainer.train(resume_from_checkpoint=str(KEPT / name / f"checkpoint-{STEP}"))
    assert trainer.state.global_step == MAX_STEPS
    # To the bit with the kernels that wrote them. Those of another torch may round differently, and for the larger
    # matrices of transformers' model those of another processor.
    is_same = (KEPT / name / "torch.txt").read_text("utf-8") == torch.__version__ and name != "transformers"
    expected = load_file(KEPT / name / "end.safetensors")
    found = {name: value for name, value in final_weights(trainer).items() if name in expected}  # tied ones once
    if trainer.is_world_process_zero():
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0 if is_same else 1e-5)


def final_weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return the whole weights of a trained model. Collective."""
    state = trainer.strategy.model_state(trainer.model_wrapped)
    return {name: value.detach().clone() for name, value in state.items()}


def keep(name: str, folder: str) -> None:
    """Train without a stop, and keep the checkpoint on the way and the weights at the end."""
    trainer: Any = RUNS[name](Path(folder))
    if name == "transformers":
        from transformers import Trainer as TheirTrainer
        from transformers import TrainingArguments as TheirArguments

        arguments = make_arguments(Path(folder), arguments=TheirArguments, save_strategy="steps", save_steps=STEP)
        set_seed(1)
        theirs = TheirTrainer(_gpt2(), arguments, train_dataset=_texts())
        theirs.train()
        weights = {each: value.detach().clone() for each, value in theirs.model.state_dict().items()}
        del weights["lm_head.weight"]  # tied
    else:
        trainer.train()
        weights = final_weights(trainer)
    if trainer.is_world_process_zero():
        shutil.rmtree(KEPT / name, ignore_errors=True)
        shutil.copytree(Path(folder) / f"checkpoint-{STEP}", KEPT / name / f"checkpoint-{STEP}")
        save_file(weights, KEPT / name / "end.safetensors")
        (KEPT / name / "torch.txt").write_text(torch.__version__, encoding="utf-8")


def main(names: list[str]) -> None:
    for name in names or RUNS:
        with tempfile.TemporaryDirectory() as folder:
            if name in NUM_PROCESSES:
                run = launch(keep, Path(folder), num_processes=2, kwargs={"name": name, "folder": f"{folder}/run"})
                assert run.returncode == 0, run.output
            else:
                keep(name, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
