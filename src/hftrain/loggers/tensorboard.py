"""TensorBoard."""

from __future__ import annotations

import datetime
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.loggers.base import Logger, RunFacts


class TensorBoardLogger(Logger):
    """Write event files to `logging_dir`, by default ``output_dir/runs/DATETIME_HOSTNAME``.

    A resumed run continues in its folder; events that the interrupted run wrote after the checkpoint are hidden.

    Args:
        tb_writer: An existing `SummaryWriter` to use; it is not closed.

    Source: the documented `TensorBoardCallback`.
    """

    name = "tensorboard"
    packages = ("tensorboard",)
    end = "close"

    def __init__(self, tb_writer: Any = None) -> None:
        self._is_own = tb_writer is None
        self._run = tb_writer

    def start(self, run: RunFacts) -> None:
        """Open the folder; record the settings as hyper-parameters and as text."""
        from torch.utils.tensorboard.summary import hparams
        from torch.utils.tensorboard.writer import SummaryWriter

        if self._is_own:
            folder = run.logging_dir or run.run_id or _new_folder(run.output_dir)
            purge = run.step + 1 if folder == run.run_id else None
            self._run = SummaryWriter(folder, purge_step=purge)
            self.run_id = folder
        self._run.add_text("args", _as_code(run.hparams))
        if run.model_config:
            self._run.add_text("model_config", _as_code(run.model_config))
        make: Any = hparams
        for summary in make(dict(run.hparams), {}):
            self._run.file_writer.add_summary(summary)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._run.add_scalar(name, value, step)
        self._run.flush()

    def log_image(self, name: str, image: Any, step: int) -> None:
        self._run.add_image(name, image, step, dataformats="HWC")

    def log_text(self, name: str, text: str, step: int) -> None:
        self._run.add_text(name, text, step)

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        """Write a table in Markdown, as a text."""
        lines = ["| " + " | ".join(map(str, row)) + " |" for row in (columns, ["---"] * len(columns), *rows)]
        self._run.add_text(name, "\n".join(lines), step)

    def finish_training(self) -> None:
        self._run.flush()


def _new_folder(output_dir: str) -> str:
    name = f"{datetime.datetime.now():%b%d_%H-%M-%S}_{socket.gethostname()}"
    folders = (f"{output_dir}/runs/{name}{suffix}" for suffix in ("", *(f"_{i}" for i in range(1, 1000))))
    return next(folder for folder in folders if not Path(folder).exists())


def _as_code(values: Mapping[str, Any]) -> str:
    """Return settings as a code block, so that TensorBoard keeps line breaks."""
    text = json.dumps(dict(values), indent=2, default=str)
    return "\n".join(f"    {line}" for line in text.splitlines())
