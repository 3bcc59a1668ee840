"""Train two commits with the same seed, and tell whether every loss, norm and weight is the same.

    python benchmarks/loss_compare.py main HEAD             # exit status 1 if anything differs
    python benchmarks/loss_compare.py v0.1.0 . --rtol 1e-6  # "." is the working tree

For changes that must not change a number: a refactoring, an upgrade (`--python` names each interpreter). Each
commit is checked out beside the repository and trains the cases below in processes of its own, two of them with gloo.
What is compared is equal to the bit unless `--rtol` allows more. A case in which nothing trained fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Processes, and arguments that differ from those of `train`.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "accumulating, bf16": (1, {"bf16": True, "gradient_accumulation_steps": 3}),
    "fp16, cosine, label smoothing": (
        1, {"fp16": True, "lr_scheduler_type": "cosine", "label_smoothing_factor": 0.1}
    ),
    "resumed": (1, {"max_steps": 12, "resumes": True}),
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp", "gradient_accumulation_steps": 2}),
}  # fmt: skip


def train(strategy: str = "single", resumes: bool = False, **settings: Any) -> dict[str, list[float]]:
    """Train a small network with dropout, evaluate it, and return the numbers of the run."""
    import torch
    from torch import nn

    from hftrain import Trainer, TrainingArguments, set_seed

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(8, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4)
            )

        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, Any]:
            logits = self.layers(x)
            return {"loss": None if labels is None else nn.functional.cross_entropy(logits, labels), "logits": logits}

    generator = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(8, generator=generator), "labels": index % 4} for index in range(90)]
    given = {"learning_rate": 1e-2, "logging_steps": 1, "max_steps": 20, "eval_strategy": "steps", "eval_steps": 7}
    quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "log_level": "error"}
    for max_steps in (7, None) if resumes else (None,):
        set_seed(7)
        more = {"max_steps": max_steps} if max_steps else {}
        args = TrainingArguments("run", **{**given, **quiet, "save_steps": 7, **settings, **more})
        trainer = Trainer(Net(), args, train_dataset=rows, eval_dataset=rows[:20], strategy=strategy)
        trainer.train(resume_from_checkpoint=resumes and max_steps is None)
    history = trainer.state.log_history
    found = {key: [line[key] for line in history if key in line] for key in ("loss", "grad_norm", "eval_loss")}
    whole = (getattr(each, "full_tensor", lambda each=each: each)() for each in trainer.model.state_dict().values())
    return {**found, "weights": [number for each in whole for number in each.flatten().tolist()]}


def run(source: Path, python: str, case: str) -> dict[str, list[float]]:
    """Return the numbers of one case, trained by the package in a folder."""
    processes = CASES[case][0]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] * (processes > 1)
    env = {**os.environ, "PYTHONPATH": str(source / "src"), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [python, *launcher, str(Path(__file__).resolve()), "--case", case]
        ran = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if ran.returncode:
            sys.exit(f"{case!r} failed with {source}:\n{ran.stdout}{ran.stderr}")
        found: dict[str, list[float]] = json.loads(Path(folder, "found.json").read_text("utf-8"))
    return found


def difference(a: dict[str, list[float]], b: dict[str, list[float]], rtol: float) -> str:
    """Name the first number that differs, or what shows that nothing trained; empty if all is well."""
    if len(set(a["loss"])) < 2 or not any(a["grad_norm"]):
        return "nothing trained"
    for key in a:
        if len(a[key]) != len(b[key]):
            return f"{len(a[key])} and {len(b[key])} numbers of {key}"
        for at, (one, two) in enumerate(zip(a[key], b[key], strict=True)):
            if not abs(one - two) <= rtol * max(abs(one), abs(two)):
                return f"{key}[{at}]: {one!r} and {two!r}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="*", help='two commits, "." for the working tree; default HEAD and "."')
    parser.add_argument("--rtol", type=float, default=0.0, help="relative difference that is allowed (0: to the bit)")
    parser.add_argument("--python", nargs=2, default=[sys.executable] * 2, help="the interpreters of the two sides")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        found = train(**CASES[options.case][1])
        if int(os.environ.get("RANK", 0)) == 0:
            Path("found.json").write_text(json.dumps(found), encoding="utf-8")
        return 0
    commits = options.commits or ["HEAD", "."]
    if len(commits) != 2:
        parser.error("Name two commits, such as `main HEAD`.")
    is_different = False
    with tempfile.TemporaryDirectory() as folder:
        sources = []
        for at, commit in enumerate(commits):
            sources.append(ROOT if commit == "." else Path(folder, str(at)))
            if commit != ".":
                subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(sources[at])], check=True)
                named = subprocess.run(
                    ["git", "rev-parse", commit], cwd=ROOT, capture_output=True, text=True, check=True
                )
                subprocess.run(["git", "checkout", "-q", named.stdout.strip()], cwd=sources[at], check=True)
        for case in CASES:
            found = [run(source, python, case) for source, python in zip(sources, options.python, strict=True)]
            problem = difference(*found, options.rtol)
            is_different |= bool(problem)
            print(f"{case:32} {'differs: ' + problem if problem else 'equal'}", flush=True)
    return int(is_different)


if __name__ == "__main__":
    sys.exit(main())
