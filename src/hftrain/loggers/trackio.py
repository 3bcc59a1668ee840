"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.loggers.base import Logger, RunFacts


class TrackioLogger(Logger):
    """Report to Trackio: to the local database, and to the Space `trackio_space_id` unless that is None.

    The project is `project`. Trackio itself reads TRACKIO_DIR.

    Source: the documented `TrackioCallback`.
    """

    name = "trackio"
    packages = ("trackio",)

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, run: RunFacts) -> None:
        """Start or continue a run; record the settings."""
        import trackio

        self._run = trackio.init(
            project=run.project,
            name=run.run_id or run.name,
            space_id=run.space_id,
            private=run.is_private,
            config=run.config,
            resume="allow" if run.run_id else "never",
            embed=False,
        )
        self.run_id = self._run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None
