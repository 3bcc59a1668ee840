"""Draw handwritten digits with a generative adversarial network: two networks, each with an optimizer of its own.

python examples/gan.py
python examples/gan.py --steps 200
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from hftrain import StepOutput, TaskModule, Trainer, TrainingArguments, set_seed

NUM_NOISE = 16


class Gan(TaskModule):
    """A generator that learns to draw what a critic takes for scans."""

    automatic_optimization = False

    def __init__(self) -> None:
        generator = nn.Sequential(nn.Linear(NUM_NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Dropout(0.3), nn.Linear(128, 1))
        super().__init__(nn.ModuleDict({"generator": generator, "critic": critic}))

    def configure_optimizers(self) -> Any:
        return {
            name: torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.99)) for name, net in self.model.items()
        }

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        real, critic = batch["pixels"], self.model["critic"]
        fake = self.model["generator"](torch.randn(len(real), NUM_NOISE, device=real.device))
        ones = torch.ones(len(real), 1, device=real.device)
        critic_loss = bce(critic(real), 0.9 * ones) + bce(critic(fake.detach()), 0 * ones)
        self.optimizers["critic"].minimize(critic_loss)
        loss = bce(critic(fake), ones)
        self.optimizers["generator"].minimize(loss)
        return StepOutput(loss=loss, logs={"critic_loss": critic_loss})


def show(image: torch.Tensor) -> str:
    """Return an image of 8 x 8 pixels as text."""
    return "\n".join("".join(" .:-=+*#%@"[int(9 * value)] * 2 for value in row) for row in image.tolist())


def main() -> None:
    """Train, then print a few digits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output-dir", default="runs/gan")
    options = parser.parse_args()
    set_seed(0)
    data = [{"pixels": torch.tensor(scan.flatten() / 16.0, dtype=torch.float32)} for scan in load_digits().images]
    args = TrainingArguments(
        options.output_dir,
        max_steps=options.steps,
        per_device_train_batch_size=64,
        lr_scheduler_type="constant",
        logging_steps=max(options.steps // 10, 1),
        save_steps=max(options.steps // 2, 1),
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(Gan(), args, train_dataset=data)
    trainer.train()
    with torch.no_grad():
        drawn = trainer.model.cpu()["generator"](torch.randn(2, NUM_NOISE)).reshape(2, 8, 8)
    print("\n\n".join(map(show, drawn)))


if __name__ == "__main__":
    main()
