"""Ray Tune itself, in processes of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_rows

from hftrain import BestRun, Trainer, TrainerCallback
from hftrain.extras.progress.bars import ProgressCallback
from hftrain.extras.search.config import SearchConfig
from hftrain.extras.search.ray_tune import search_with_ray

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    # What Ray itself warns of, and sockets and files that it leaves to the end of the process.
    pytest.mark.filterwarnings("ignore"),
]


class Open(TrainerCallback):
    """Hold an open file, as a writer of logs does."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w")

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("It cannot travel.")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    module = pytest.importorskip("ray")
    pytest.importorskip("ray.tune")
    # Its processes import what this one does.
    path = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    # Set by a library of Ray's when a table of results is first written, and never unset.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("CRC32C_SW_MODE", os.environ.get("CRC32C_SW_MODE", "auto"))
    module.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}}
    )
    yield module
    module.shutdown()
    monkeypatch.undo()


def test_ray_searches(ray: Any, tmp_path: Path) -> None:
    from ray import tune

    callback = Open(tmp_path / "open.txt")
    args = make_arguments(
        tmp_path / "out",
        num_train_epochs=2,
        lr_scheduler_type="constant",
        eval_strategy="epoch",
        save_strategy="epoch",
        ray_scope="all",
    )
    trainer = Trainer(
        model_init=Net, args=args, train_dataset=make_rows(), eval_dataset=make_rows(8), callbacks=[callback]
    )
    callbacks, before = list(trainer.callback_handler.callbacks), args.to_dict()
    best = trainer.hyperparameter_search(
        lambda _: {"learning_rate": tune.grid_search([1e-4, 1e-1]), "seed": 3},
        n_trials=1,
        backend="ray",
        storage_path=str(tmp_path / "ray"),
        name="search",
        verbose=0,
    )
    callback.file.close()
    assert isinstance(best, BestRun)
    assert trainer.callback_handler.callbacks == callbacks
    assert args.to_dict() == before
    results = {t.config["learning_rate"]: t for t in best.run_summary.trials}
    assert best.objective == min(trial.metric_analysis["objective"]["min"] for trial in results.values())
    assert best.run_id == results[best.hyperparameters["learning_rate"]].trial_id
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        f"run-{trial.trial_id}" for trial in results.values()
    )
    # What Ray was given to resume from: the checkpoint that was there at the last evaluation.
    assert all(trial.checkpoint is not None for trial in results.values())
    assert not any(isinstance(each, ProgressCallback) for each in callbacks)


def resuming(values: dict[str, Any], *, run_id: str, report: Any, resume: str | None = None) -> float:
    """Fail once, after a checkpoint was reported."""
    folder = Path(values["folder"])
    if resume is None:
        saved = folder / "checkpoint-1"
        saved.mkdir(parents=True)
        (saved / "weights").write_text("3.5")
        report(9.0, step=1, folder=str(folder))
        raise RuntimeError("once")
    return float((Path(resume) / "weights").read_text())


def test_trial_that_ray_starts_again_goes_on_from_its_checkpoint(ray: Any, tmp_path: Path) -> None:
    config = SearchConfig(
        space=lambda _: {"folder": str(tmp_path / "run")},
        num_trials=1,
        directions=("minimize",),
        options={"max_failures": 1, "storage_path": str(tmp_path / "ray"), "name": "again", "verbose": 0},
    )
    best = search_with_ray(config, resuming, evaluates=False)
    assert best.objective == 3.5
