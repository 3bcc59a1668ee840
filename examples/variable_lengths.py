"""Name the state of a machine at every moment of recordings of different lengths, with an LSTM.

python examples/variable_lengths.py
torchrun --nproc_per_node 2 examples/variable_lengths.py
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from datasets import Dataset
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torchmetrics.classification import MulticlassAccuracy

from hftrain import StepOutput, SummaryCallback, TaskModule, Trainer, TrainingArguments, set_seed

# How a signal goes on in each state: the share of the last value, and that of the one before.
STATES = {"calm": (0.0, 0.0), "drifting": (1.0, 0.0), "swinging": (1.6, -0.95)}


# %% data
def record(seed: int) -> dict[str, list | int]:
    """Return a recording of 1 to 12 stretches: {"signal": float [length], "state": int [length], "length"}."""
    generator = torch.Generator().manual_seed(seed)
    state = torch.randint(len(STATES), (int(torch.randint(1, 13, (), generator=generator)),), generator=generator)
    state = state.repeat_interleave(torch.randint(10, 25, state.shape, generator=generator))
    signal, noise = [0.0, 0.0], 0.5 * torch.randn(len(state), generator=generator)
    for each, number in zip(state.tolist(), noise.tolist(), strict=True):
        last, before = list(STATES.values())[each]
        signal.append(last * signal[-1] + before * signal[-2] + number)
    return {"signal": signal[2:], "state": state.tolist(), "length": len(state)}


def records(seeds: range) -> Dataset:
    """Return recordings as a data set with a column "length"."""
    return Dataset.from_list([record(seed) for seed in seeds]).with_format("torch")


train_set, eval_set = records(range(800)), records(range(10_000, 10_200))


# %% batches
def collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pad the recordings of a batch to the longest one; the padding's state is -1."""
    return {
        "signal": pad_sequence([sample["signal"] for sample in samples], batch_first=True),
        "state": pad_sequence([sample["state"] for sample in samples], batch_first=True, padding_value=-1),
        "length": torch.tensor([sample["length"] for sample in samples]),
    }


# %% model
class Recogniser(nn.Module):
    """An LSTM that reads both ways; returns logits [batch, time, state]."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, channels, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * channels, len(STATES))

    def forward(self, signal: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        """Pack the batch, so that the backward direction starts at the end of each recording and not in its padding."""
        packed = pack_padded_sequence(signal[..., None], length.cpu(), batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(hidden)


# %% task
class Recognise(TaskModule):
    """Cross-entropy and accuracy of the moments that were recorded."""

    def __init__(self) -> None:
        super().__init__(Recogniser())
        self.accuracy = MulticlassAccuracy(len(STATES), average="micro", ignore_index=-1)

    def count_items(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the number of moments that are not padding: the loss is a mean over these."""
        return (batch["state"] >= 0).sum()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the mean over the moments that are not padding."""
        logits = self.model(batch["signal"], batch["length"])
        return nn.functional.cross_entropy(logits.transpose(1, 2), batch["state"], ignore_index=-1)

    def evaluation_step(self, batch: dict[str, torch.Tensor]) -> StepOutput:
        """Return the same loss, and update the accuracy."""
        logits = self.model(batch["signal"], batch["length"]).transpose(1, 2)
        self.accuracy.update(logits, batch["state"])
        return StepOutput(loss=nn.functional.cross_entropy(logits, batch["state"], ignore_index=-1))


# %% train
set_seed(0)
trainer = Trainer(
    Recognise(),
    TrainingArguments(
        "runs/variable_lengths",
        num_train_epochs=4,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        train_sampling_strategy="group_by_length",
        remove_unused_columns=False,  # the task reads "state"
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        logging_steps=10,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=train_set,
    eval_dataset=eval_set,
    data_collator=collate,
    callbacks=[SummaryCallback()],
)


# %% padding
def padding(sampling: str) -> float:
    """Return the share of an epoch's batches that is padding."""
    trainer.args.train_sampling_strategy = sampling
    states = [batch["state"] for batch in trainer.get_train_dataloader()]
    return sum((state < 0).sum() for state in states) / sum(state.numel() for state in states)


print(f"padding: {padding('random'):.0%} in random order, {padding('group_by_length'):.0%} grouped by length")

# %% fit
trainer.train()

# %% evaluate
for size in (1, 8, 200):
    trainer.args.per_device_eval_batch_size = size
    print(f"evaluated in batches of {size}: loss {trainer.evaluate()['eval_loss']:.6f}")

# %% samples
sample = max(eval_set.select(range(20)), key=lambda sample: sample["length"])
with torch.no_grad():
    predicted = trainer.model.eval()(sample["signal"][None], torch.tensor([sample["length"]]))[0].argmax(-1)
_, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(7, 3.2), layout="constrained")
above.plot(sample["signal"])
below.step(range(len(predicted)), sample["state"], label="true", linewidth=4, alpha=0.4)
below.step(range(len(predicted)), predicted, label="predicted")
below.set_yticks(range(len(STATES)), STATES)
below.legend()
plt.savefig("runs/variable_lengths/states.svg")
