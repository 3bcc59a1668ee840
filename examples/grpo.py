"""Reinforcement learning of a language model: group relative policy optimization (GRPO) of a toy task on a CPU.

python examples/grpo.py
"""

from __future__ import annotations

import argparse

import torch
from torch import nn

from hftrain import Engine

VOCABULARY, LENGTH, NUM_PROMPTS, GROUP = 12, 8, 16, 8


class Policy(nn.Module):
    """A recurrent language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.rnn = nn.GRU(32, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the log-probabilities of the token after each one."""
        return self.head(self.rnn(self.embed(tokens))[0]).log_softmax(-1)


@torch.no_grad()
def sample(policy: nn.Module, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, log_probs = prompts[:, None], []
    for _ in range(LENGTH):
        last = policy(tokens)[:, -1]
        tokens = torch.cat([tokens, last.exp().multinomial(1)], dim=1)
        log_probs.append(last.gather(1, tokens[:, -1:]))
    return tokens, torch.cat(log_probs, dim=1)


def log_probs_of(policy: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return policy(tokens[:, :-1]).gather(2, tokens[:, 1:, None]).squeeze(2)


def grpo_loss(policy: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    ratio = (log_probs_of(policy, batch["tokens"]) - batch["log_probs"]).exp()
    clipped = ratio.clamp(0.8, 1.2)
    return -torch.minimum(ratio * batch["advantage"], clipped * batch["advantage"]).mean()


def main() -> None:
    """Learn to repeat the prompt's token, and print the mean reward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    with Engine(max_grad_norm=1.0, seed=0) as engine:
        engine.setup(Policy(), lambda model: torch.optim.Adam(model.parameters(), lr=5e-3))
        torch.manual_seed(engine.rank)
        sampler = Policy().to(engine.device)  # stands for an inference engine such as vLLM
        for step in range(options.steps):
            sampler.load_state_dict(dict(engine.weights()))
            prompts = torch.randint(VOCABULARY, (NUM_PROMPTS,), device=engine.device).repeat_interleave(GROUP)
            tokens, log_probs = sample(sampler, prompts)
            reward = (tokens[:, 1:] == prompts[:, None]).float().mean(1).view(NUM_PROMPTS, GROUP)
            advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
            batch = {"tokens": tokens, "log_probs": log_probs, "advantage": advantage.view(-1, 1)}
            with engine.evaluating() as policy:
                gap = (log_probs_of(policy, tokens) - log_probs).abs().max()
            assert gap < 1e-4, f"sampler and trainer disagree by {gap:.1e}"
            for _ in range(2):
                engine.forward_backward(batch, grpo_loss)
                engine.optim_step()
            mean = engine.reduce(reward.mean(), "mean")
            if engine.is_main and (step + 1) % 30 == 0:
                print(f"step {step + 1}: reward {mean:.2f}")


if __name__ == "__main__":
    main()
