"""Draw handwritten digits with a diffusion model (DDPM), from averaged weights.

python examples/diffusion.py
torchrun --nproc_per_node 2 examples/diffusion.py
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from torch import nn

from hftrain import EMA, SummaryCallback, TaskModule, Trainer, TrainingArguments, set_seed

STEPS = 100  # noise levels

# %% data
scans = load_digits()
images = torch.tensor(scans.data / 8 - 1, dtype=torch.float32)  # [1797, 64], from -1 to 1
data = [{"pixels": pixels, "digit": digit} for pixels, digit in zip(images, torch.tensor(scans.target), strict=True)]

# %% noise
betas = torch.linspace(1e-4, 0.07, STEPS)
signal = (1 - betas).cumprod(0)  # the share of the picture that is left at each level, down to 0.03


# %% model
class Denoiser(nn.Module):
    """Predict the noise in pictures [batch, 64] at levels [batch] of digits [batch]."""

    def __init__(self, width: int = 384) -> None:
        super().__init__()
        self.level, self.digit = nn.Embedding(STEPS, width), nn.Embedding(10, width)
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(3)
        )

    def forward(self, pixels: torch.Tensor, level: torch.Tensor, digit: torch.Tensor) -> torch.Tensor:
        """Return the noise, in the shape of the pictures."""
        x = self.first(pixels)
        for block in self.blocks:
            x = x + block(x + self.level(level) + self.digit(digit))
        return self.last(x)


# %% task
class Diffusion(TaskModule):
    """The mean squared error of the predicted noise."""

    def __init__(self) -> None:
        super().__init__(Denoiser())
        self.register_buffer("signal", signal)

    def training_step(self, batch: dict[str, torch.Tensor], generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw a level and noise for each picture, and predict the noise."""
        pixels = batch["pixels"]
        level = torch.randint(STEPS, (len(pixels),), generator=generator).to(pixels.device)
        noise = torch.randn(pixels.shape, generator=generator).to(pixels)
        share = self.signal[level][:, None]
        predicted = self.model(share.sqrt() * pixels + (1 - share).sqrt() * noise, level, batch["digit"])
        return nn.functional.mse_loss(predicted, noise)

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the same loss with the same noise each time, so that evaluations can be compared."""
        return self.training_step(batch, torch.Generator().manual_seed(0))


# %% train
set_seed(0)
trainer = Trainer(
    Diffusion(),
    TrainingArguments(
        "runs/diffusion",
        max_steps=1500,
        per_device_train_batch_size=64,
        learning_rate=1e-3,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=100,
        logging_steps=50,
        eval_strategy="steps",
        eval_steps=250,
        save_steps=500,
        save_total_limit=1,
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=data[:1600],
    eval_dataset=data[1600:],
    callbacks=[EMA(decay=0.995), SummaryCallback()],
)
trainer.train()
average, last = trainer.evaluate(), trainer.evaluate(ckpt="last", weights="live")
print(f"loss of the averaged weights {average['eval_loss']:.4f}, of the last ones {last['eval_loss']:.4f}")


# %% sample
@torch.no_grad()
def sample(model: nn.Module, digit: torch.Tensor) -> list[torch.Tensor]:
    """Start with noise and remove a part of it at each level; return the pictures on the way."""
    x, way = torch.randn(len(digit), 64), []
    for level in reversed(range(STEPS)):
        noise = model(x, torch.full((len(digit),), level), digit)
        x = (x - betas[level] / (1 - signal[level]).sqrt() * noise) / (1 - betas[level]).sqrt()
        if level:
            x = x + betas[level].sqrt() * torch.randn_like(x)
        way.append(x)
    return way


trainer.save_model()  # the averaged weights
denoiser = Denoiser()
denoiser.load_state_dict(load_file("runs/diffusion/model.safetensors"))
set_seed(1)
way = sample(denoiser, torch.arange(10))
shown = (1, 50, 75, 90, 95, 100)  # steps done
tiles = [nn.functional.pad(way[steps - 1].view(10, 8, 8), (1, 1, 1, 1), value=1) for steps in shown]
rows = [tile.permute(1, 0, 2).reshape(10, 100) for tile in tiles]
_, axis = plt.subplots(figsize=(7, 4), layout="constrained")
axis.imshow(torch.cat(rows), cmap="gray", vmin=-1, vmax=1, interpolation="none")
axis.set_xticks(range(5, 105, 10), range(10))
axis.set_yticks(range(5, 65, 10), [f"{steps} %" for steps in shown])
plt.savefig("runs/diffusion/samples.svg")
