"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.core.errors import check_known
from hftrain.loggers.base import MediaByWrapping, RunFacts

_WATCHED = ("false", "gradients", "parameters", "all")


class WandbLogger(MediaByWrapping):
    """Report to Weights & Biases, in the open run if there is one.

    Environment variables: WANDB_PROJECT (``"huggingface"``), WANDB_LOG_MODEL (``"false"``, ``"end"``,
    ``"checkpoint"``), WANDB_WATCH (``"false"``, ``"gradients"``, ``"parameters"``, ``"all"``), WANDB_DISABLED; wandb
    itself reads WANDB_MODE, WANDB_DIR, WANDB_API_KEY and its other variables.

    Source: the documented `WandbCallback`.
    """

    name = "wandb"
    packages = ("wandb",)
    off_switch = "WANDB_DISABLED"
    uploads = ("WANDB_LOG_MODEL", {"true": "end", "end": "end", "checkpoint": "checkpoint"})
    _model: Any = None

    def __init__(self) -> None:
        super().__init__()
        self._watched = os.environ.get("WANDB_WATCH", "false").lower()
        check_known(self._watched, _WATCHED, f"WANDB_WATCH={self._watched!r} is set.", "")

    def start(self, run: RunFacts) -> None:
        """Open or join a run, record the settings, and watch the model if requested."""
        import wandb

        self._is_own = wandb.run is None
        if self._is_own:
            resume = {"id": run.run_id, "resume": "allow"} if run.run_id else {}
            wandb.init(project=os.environ.get("WANDB_PROJECT", "huggingface"), name=run.name, **resume)
        self._run = wandb.run
        self.run_id = self._run.id
        self._run.config.update(run.config, allow_val_change=True)
        self._run.define_metric("train/global_step")
        self._run.define_metric("*", step_metric="train/global_step", step_sync=True)
        if self._watched != "false" and run.model is not None:
            self._model = run.model
            self._run.watch(run.model, log=self._watched, log_freq=max(100, run.log_every))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "train/global_step": step})

    def log_artifact(self, folder: Path, step: int) -> None:
        import wandb

        artifact = wandb.Artifact(f"model-{self._run.id}", type="model", metadata={"step": step})
        artifact.add_dir(str(folder))
        self._run.log_artifact(artifact, aliases=[folder.name, "latest"])

    def finish_training(self) -> None:
        if self._model is not None:
            self._run.unwatch(self._model)
            self._model = None
