"""Read handwritten digits in a training loop of one's own: `Engine` adds processes, precision and checkpoints.

python examples/own_loop.py
torchrun --nproc_per_node 2 examples/own_loop.py --strategy fsdp --precision bf16

Interrupt it and start it again: it goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hftrain import Engine


def train(options: argparse.Namespace) -> float:
    """Train to the end and return the accuracy on digits that were not trained on."""
    scans = load_digits()
    data = TensorDataset(torch.tensor(scans.data / 16, dtype=torch.float32), torch.tensor(scans.target))
    train_set, test_set = (torch.utils.data.Subset(data, part) for part in (range(1500), range(1500, len(data))))
    with Engine(
        strategy=options.strategy,
        precision=options.precision,
        seed=1,
        output_dir=options.output_dir,
        save_total_limit=2,
        max_grad_norm=1.0,
    ) as engine:
        network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))
        model, optimizer = engine.setup(network, lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3))
        schedule = engine.register("schedule", torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.995))
        batches = engine.shard(DataLoader(train_set, batch_size=32, shuffle=True))
        test_batches = engine.shard(DataLoader(test_set, batch_size=64), training=False)
        accuracy, step = 0.0, engine.load("auto")
        while batches.epoch < options.epochs:
            for pixels, digits in batches:
                with engine.autocast():
                    loss = nn.functional.cross_entropy(model(pixels), digits)
                engine.backward(loss)
                engine.clip()
                if engine.step():
                    schedule.step()
                step += 1
                if step % 100 == 0:
                    engine.save(step)
            counts = torch.zeros(2, device=engine.device)
            with engine.evaluating() as evaluated:
                for pixels, digits in test_batches:
                    is_right = evaluated(pixels).argmax(1) == digits
                    counts += torch.stack([is_right.sum(), torch.ones_like(digits).sum()])
            right, total = engine.reduce(counts, "sum").tolist()
            accuracy = right / total
            if engine.is_main:
                print(f"epoch {batches.epoch}, step {step}: accuracy {accuracy:.3f} on {total:.0f} digits")
        return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output-dir", default="runs/own_loop")
    train(parser.parse_args())
