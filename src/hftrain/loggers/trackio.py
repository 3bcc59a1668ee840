"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.loggers.base import Logger, RunFacts


class TrackioLogger(Logger):
    """Report to Trackio: to the local database, and to the Space `trackio_space_id` unless that is None.

    The project is `project`. With `trackio_static_space_id` the ended run is put into a Space that only shows it.
    Trackio itself reads TRACKIO_DIR.

    Source: the documented `TrackioCallback`.
    """

    name = "trackio"
    packages = ("trackio",)

    def __init__(self) -> None:
        self._run: Any = None
        self._facts: RunFacts | None = None

    def start(self, run: RunFacts) -> None:
        """Start or continue a run; record the settings."""
        import trackio

        # Older versions do not take a bucket.
        bucket = {} if run.bucket_id is None else {"bucket_id": run.bucket_id}
        self._facts = run
        self._run = trackio.init(
            project=run.project,
            name=run.run_id or run.name,
            space_id=run.space_id,
            private=run.is_private,
            config=run.config,
            resume="allow" if run.run_id else "never",
            embed=False,
            **bucket,
        )
        self.run_id = self._run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run, and put it into its static Space."""
        if self._run is None:
            return
        self._run.finish()
        self._run = None
        run = self._facts
        if run is None or run.static_space_id is None:
            return
        import trackio

        if run.space_id is not None:
            trackio.freeze(
                space_id=run.space_id, project=run.project, new_space_id=run.static_space_id, private=run.is_private
            )
            return
        bucket = {} if run.bucket_id is None else {"bucket_id": run.bucket_id}
        trackio.sync(
            project=run.project,
            sdk="static",
            space_id=run.static_space_id,
            private=run.is_private,
            force=True,
            **bucket,
        )
