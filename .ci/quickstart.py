"""Compare the three runs of `nox -s quickstart` in a table and a picture: `python .ci/quickstart.py FOLDER STOP`.

The folder holds the runs "uninterrupted", "resumed" and "two_processes" of examples/digits.py; STOP is the
step after which the second one was stopped. The exit status is 1 if it then differs from the first one.
"""

from __future__ import annotations

import filecmp
import json
import sys
from pathlib import Path
from typing import Any

RUNS = {"uninterrupted": "uninterrupted", "resumed": "stopped and resumed", "two_processes": "two processes, bfloat16"}
FILES = ("best/model.safetensors", "checkpoint-{last}/model.safetensors", "predictions.csv")


def read(folder: Path, name: str) -> Any:
    """Return what a JSON file of a run holds."""
    return json.loads((folder / name).read_text("utf-8"))


def print_table(folder: Path) -> None:
    """Print a line per run."""
    print(f"  {'run':<24}{'steps':>6}{'last loss':>11}{'best evaluation':>17}{'test accuracy':>15}")
    for name, title in RUNS.items():
        state, test = read(folder / name, "trainer_state.json"), read(folder / name, "test_results.json")
        loss = [entry["loss"] for entry in state["log_history"] if "loss" in entry][-1]
        accuracies = f"{state['best_metric']:>17.2%}{test['test_accuracy']:>15.2%}"
        print(f"  {title:<24}{state['global_step']:>6}{loss:>11.6f}{accuracies}")


def draw(folder: Path, stop: int) -> Path:
    """Draw loss and accuracy of the runs into one picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles: dict[str, dict[str, Any]] = {
        "uninterrupted": {"color": "tab:blue", "linewidth": 6, "alpha": 0.35},
        "resumed": {"color": "tab:red", "marker": "o", "markersize": 4},
        "two_processes": {"color": "tab:gray", "linestyle": "--"},
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    for name, title in RUNS.items():
        history = read(folder / name, "trainer_state.json")["log_history"]
        for axis, key in zip(axes, ("loss", "eval_accuracy"), strict=True):
            points = [(entry["epoch"], entry[key]) for entry in history if key in entry]
            axis.plot(*zip(*points, strict=True), label=title, **styles[name])
    state = read(folder / "resumed", "trainer_state.json")
    stopped_at = stop / state["global_step"] * state["epoch"]
    for axis in axes:
        axis.axvline(stopped_at, color="tab:red", linestyle=":", label=f"stopped at step {stop}")
        axis.set_xlabel("epoch")
    axes[0].set(title="Training loss", yscale="log")
    axes[1].set(title="Evaluation accuracy")
    axes[1].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(folder / "quickstart.png", dpi=120)
    return folder / "quickstart.png"


def main() -> None:
    """Compare the runs."""
    folder, stop = Path(sys.argv[1]), int(sys.argv[2])
    print_table(folder)
    last = read(folder / "uninterrupted", "trainer_state.json")["global_step"]
    for name in (each.format(last=last) for each in FILES):
        if not filecmp.cmp(folder / "uninterrupted" / name, folder / "resumed" / name, shallow=False):
            sys.exit(f"The resumed run differs from the uninterrupted one in {name}.")
    print("Resumed = uninterrupted: weights and predictions are bit-identical.")
    print(f"Picture of the three runs: {draw(folder, stop)}")


if __name__ == "__main__":
    main()
