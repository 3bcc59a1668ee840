"""Example scripts run once with either library's Trainer, and what the two runs leave behind compared."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.resuming import assert_trained, without_times

FOLDER = Path(__file__).parent.parent / "interop" / "scripts"
# The statements that a user changes. Models and tokenizers come from transformers on either side.
THEIR_IMPORTS = ("from transformers import ", "from transformers.trainer_utils import ")
OUR_IMPORT = "from hftrain import "
FLAGS = {
    "num_train_epochs": "2", "per_device_train_batch_size": "4", "per_device_eval_batch_size": "4",
    "learning_rate": "1e-3", "optim": "adamw_torch_fused", "logging_steps": "1", "save_strategy": "epoch",
    "eval_strategy": "epoch", "report_to": "none", "use_cpu": "True", "disable_tqdm": "True", "seed": "7",
}  # fmt: skip
# hftrain's list of a checkpoint's files, and its arguments as plain data where transformers pickles them.
OURS_ONLY = {"manifest.json", "journal.jsonl"}


def script_text(name: str, library: str) -> str:
    """Return a script as it is written, or with its imports from transformers changed."""
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    assert text.count(THEIR_IMPORTS[0]) == 1
    if library == "hftrain":
        for statement in THEIR_IMPORTS:
            text = text.replace(statement, OUR_IMPORT)
    return text


def run_script(name: str, library: str, folder: Path, patch: pytest.MonkeyPatch, **flags: Any) -> Path:
    """Run a script's `main()` in this process, with a command line made of `flags`; None leaves one out."""
    words = [name, "--output_dir", str(folder), "--do_train", "--do_eval"]
    for flag, value in {**FLAGS, **flags}.items():
        if value is not None:
            words += [f"--{flag}", *([] if value is True else [str(value)])]
    module = types.ModuleType(f"script_{name}_{library}")
    patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(sys, "argv", words)
    exec(compile(script_text(name, library), str(FOLDER / f"{name}.py"), "exec"), vars(module))
    module.main()
    return folder


def run_both(name: str, folder: Path, patch: pytest.MonkeyPatch, **flags: Any) -> tuple[Path, Path]:
    """Run a script with hftrain's Trainer and with transformers'."""
    return tuple(  # type: ignore[return-value]
        run_script(name, library, folder / library / "out", patch, **flags) for library in ("hftrain", "transformers")
    )


def history_of(folder: Path) -> list[dict[str, Any]]:
    """Return a run's log without times, as `save_state` or the last checkpoint wrote it."""
    history = json.loads((folder / "trainer_state.json").read_text("utf-8"))["log_history"]
    return [{name: value for name, value in line.items() if name != "total_flos"} for line in without_times(history)]


def assert_close(ours: Any, theirs: Any, where: str, rel: float) -> None:
    """Compare nested values: numbers to a relative difference, all others exactly."""
    if isinstance(theirs, Mapping):
        assert ours.keys() == theirs.keys(), where
        for key, value in theirs.items():
            assert_close(ours[key], value, f"{where}.{key}", rel)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for index, value in enumerate(theirs):
            assert_close(ours[index], value, f"{where}[{index}]", rel)
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=rel, abs=1e-6, nan_ok=True), where
    else:
        assert ours == theirs, where


def files_of(folder: Path) -> set[str]:
    """Name the files that a run wrote, checkpoints and all."""
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if Path(name).name not in OURS_ONLY}


def assert_same_outcome(folders: tuple[Path, Path], *, ignore: Iterable[str] = (), rel: float = 1e-4) -> None:
    """Compare the names of all files, log histories, metrics, what was predicted, and the final weights.

    Args:
        folders: Of hftrain's run and of transformers'.
        ignore: Names of metrics in which the two differ by a rule that the test names.
        rel: How far numbers may be apart.
    """
    ours, theirs = folders
    assert files_of(ours) == files_of(theirs)
    assert_trained(history_of(ours))
    logs = [[_without(line, ignore) for line in history_of(folder)] for folder in folders]
    assert_close(*logs, "log_history", rel)
    for path in sorted(theirs.glob("*_results.json")):
        results = [json.loads((folder / path.name).read_text("utf-8")) for folder in folders]
        [mine], [other] = (without_times([_without(result, ignore)]) for result in results)
        assert_close(mine, other, path.name, rel)
    for path in sorted(theirs.glob("*.txt")):
        assert (ours / path.name).read_text("utf-8") == path.read_text("utf-8"), path.name
    assert_same_weights(ours, theirs)


def assert_same_weights(ours: Path, theirs: Path) -> None:
    """Compare all saved weights of two folders, the checkpoints' too."""
    from safetensors.torch import load_file
    from torch.testing import assert_close

    names = sorted(str(path.relative_to(theirs)) for path in theirs.rglob("*.safetensors"))
    assert names
    for name in names:
        mine, other = load_file(ours / name), load_file(theirs / name)
        assert mine.keys() == other.keys(), name
        for key, value in other.items():
            # Adam turns a last-bit difference of a small gradient into one of the update, hence the absolute tolerance.
            assert_close(mine[key], value, rtol=1e-4, atol=1e-4, msg=lambda text, at=f"{name}, {key}": f"{at}: {text}")


def _without(line: Mapping[str, Any], ignored: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in {*ignored, "total_flos"}}
