"""Flyte, inside a Flyte task."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.loggers.base import Logger, RunFacts


class FlyteLogger(Logger):
    """Save checkpoints with Flyte and show the log in a Deck, from inside a Flyte task.

    Args:
        save_log_history: Add a Deck with a table of the logged metrics.
        sync_checkpoints: Save each checkpoint with the task's intra-task checkpointing.

    Source: the documented `FlyteCallback`.
    """

    name = "flyte"
    packages = ("flytekit",)

    def __init__(self, save_log_history: bool = True, sync_checkpoints: bool = True) -> None:
        self.artifacts = "checkpoint" if sync_checkpoints else "no"
        self._shows_log = save_log_history
        self._rows: list[dict[str, Any]] = []

    @classmethod
    def joins_all(cls) -> bool:
        """Return whether this is a Flyte execution."""
        return "FLYTE_INTERNAL_EXECUTION_ID" in os.environ

    def start(self, run: RunFacts) -> None:
        """Start a new table."""
        self._rows = []

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a row to the table."""
        self._rows.append({"step": step, **metrics})

    def log_artifact(self, folder: Path, step: int) -> None:
        """Save a checkpoint with Flyte, which restores it for a retried task."""
        from flytekit import current_context

        checkpoint: Any = current_context().checkpoint
        checkpoint.save(str(folder))

    def finish_training(self) -> None:
        """Show the table in a Deck."""
        from flytekit import Deck

        if self._shows_log and self._rows:
            Deck("Log History", _table(self._rows))


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{row.get(name, '')}</td>" for name in names) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"
