"""Measure the time from the interpreter's start to the end of the first step, next to a plain script's.

    python benchmarks/startup.py                                    # the table, a minute
    python benchmarks/startup.py --rounds 1 --contenders plain hftrain

Each contender trains a linear model of 18 parameters with AdamW, a linear schedule and clipping, from the same samples,
in an interpreter of its own, in rounds of all. What counts is the CPU time of that process: a busy neighbour makes wall
time longer, not this. Bytecode is compiled in a first round that is not counted. Imports are most of it, so the modules
are counted, too. torch imports its compiler (`torch._dynamo`) in the first optimizer's step, in the plain script as in
the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any

CONTENDERS = ("plain", "hftrain", "transformers")
BUDGET_S = 1.0


def train(contender: str, *, lists_modules: bool) -> None:
    """Train one step, and print what it took, or the modules that are imported by then."""
    import torch
    from torch import nn

    torch_s = time.process_time()
    num_steps = 10

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": nn.functional.cross_entropy(self.linear(inputs), labels)}

    torch.manual_seed(0)
    net = Net()
    samples = [{"inputs": torch.randn(8), "labels": torch.tensor(index % 2)} for index in range(64)]
    found: dict[str, Any] = {}

    def stop() -> None:
        found.update(torch_s=torch_s, step_s=time.process_time(), num_modules=len(sys.modules))
        if lists_modules:
            found["modules"] = [*sys.modules]

    if contender == "plain":
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
        batch = next(iter(torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)))  # type: ignore[arg-type]
        net(**batch)["loss"].backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        stop()
    else:
        with_trainer(contender, net, samples, stop, num_steps=num_steps)
    print(json.dumps(found["modules"] if lists_modules else found))


def with_trainer(contender: str, net: Any, samples: list[Any], stop: Any, *, num_steps: int) -> None:
    """Train one step with a Trainer's defaults, except for what it would print."""
    if contender == "hftrain":
        from hftrain import Trainer, TrainerCallback, TrainingArguments
    else:
        from transformers import Trainer, TrainerCallback, TrainingArguments  # type: ignore[assignment]

    class Stop(TrainerCallback):  # type: ignore[misc, valid-type]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stop()
            control.should_training_stop = True

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=num_steps, per_device_train_batch_size=8, learning_rate=1e-3, use_cpu=True,
            report_to="none", disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        Trainer(net, arguments, train_dataset=samples, callbacks=[Stop()]).train()


def measure(contender: str) -> dict[str, float]:
    """Train in a fresh interpreter; return CPU seconds until torch is there and until the first step is done."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, __file__, "--train", contender]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often all take their turn")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--modules", choices=CONTENDERS, help="only print what this one has imported by then")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train or options.modules:
        train(options.train or options.modules, lists_modules=options.modules is not None)
        return
    names = [name for name in options.contenders if name == "plain" or find_spec(name) is not None]
    for name in names:
        measure(name)
    results = [{name: measure(name) for name in names} for _ in range(options.rounds)]
    print("| contender | CPU s to the first step | of them `import torch` | more than plain | modules |")
    print("|---|---:|---:|---:|---:|")
    for name in names:
        taken_s, torch_s, modules = (
            statistics.median(each[name][key] for each in results) for key in ("step_s", "torch_s", "num_modules")
        )
        more_s = statistics.median(each[name]["step_s"] - each[names[0]]["step_s"] for each in results)
        print(f"| {name} | {taken_s:.2f} | {torch_s:.2f} | {more_s:+.2f} | {modules:.0f} |")
        if name == "hftrain" and names[0] == "plain":
            verdict = f"hftrain takes {more_s:.2f} s more than plain; the budget is {BUDGET_S:g} s."
    if {"plain", "hftrain"} <= {*names}:
        print(f"\n{verdict}")


if __name__ == "__main__":
    main()
