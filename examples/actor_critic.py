"""Learn to walk to the middle of a corridor with an actor and a critic, each with an optimizer of its own.

python examples/actor_critic.py
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn
from torch.nn.functional import one_hot

from hftrain import StepOutput, TaskModule, Trainer, TrainingArguments, set_seed

NUM_CELLS, NUM_MOVES, DISCOUNT = 11, 12, 0.9


class ActorCritic(TaskModule):
    """An actor that goes left, stays or goes right, and a critic that says what a cell is worth."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__(nn.ModuleDict({"actor": nn.Linear(NUM_CELLS, 3), "critic": nn.Linear(NUM_CELLS, 1)}))

    def configure_optimizers(self) -> Any:
        rates = {"actor": 0.05, "critic": 0.1}
        return {name: torch.optim.Adam(self.model[name].parameters(), lr=rate) for name, rate in rates.items()}

    def training_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        cell, total = batch["cell"], torch.zeros((), device=batch["cell"].device)
        seen, moves, rewards = [], [], []
        for _ in range(NUM_MOVES):
            seen.append(one_hot(cell, NUM_CELLS).float())
            moves.append(torch.distributions.Categorical(logits=self.model["actor"](seen[-1]).detach()).sample())
            cell = (cell + moves[-1] - 1).clamp(0, NUM_CELLS - 1)
            rewards.append((cell == NUM_CELLS // 2).float())
            total = total + rewards[-1].mean()
        gains, gain = [], torch.zeros_like(rewards[0])
        for reward in reversed(rewards):
            gain = reward + DISCOUNT * gain
            gains.insert(0, gain)
        state, move, worth = torch.cat(seen), torch.cat(moves), torch.cat(gains)
        critic_loss = (self.model["critic"](state).squeeze(1) - worth).square().mean()
        self.optimizers["critic"].minimize(critic_loss)
        with torch.no_grad():
            advantage = worth - self.model["critic"](state).squeeze(1)
        log_probs = torch.distributions.Categorical(logits=self.model["actor"](state)).log_prob(move)
        loss = -(log_probs * advantage).mean()
        self.optimizers["actor"].minimize(loss)
        return StepOutput(loss=loss, logs={"critic_loss": critic_loss, "reward": total / NUM_MOVES})


def main() -> None:
    """Train, and print how often the actor was in the middle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    set_seed(0)
    data = [{"cell": torch.tensor(index % NUM_CELLS)} for index in range(1024)]
    args = TrainingArguments(
        "runs/actor_critic",
        max_steps=options.steps,
        per_device_train_batch_size=32,
        lr_scheduler_type="constant",
        logging_steps=max(options.steps // 10, 1),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(ActorCritic(), args, train_dataset=data)
    trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"Share of moves that end in the middle: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at the end.")


if __name__ == "__main__":
    main()
