"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hftrain.loggers.base import MediaByWrapping, RunFacts


class TrackioLogger(MediaByWrapping):
    """Report to Trackio's local database, and to the Space `trackio_space_id` unless that is None.

    The project is `project`. With `trackio_static_space_id`, the finished run is published to a static Space.
    Trackio itself reads TRACKIO_DIR.

    Source: the documented `TrackioCallback`.
    """

    name = "trackio"
    packages = ("trackio",)
    _is_own = True
    _facts = RunFacts(name="")

    def start(self, run: RunFacts) -> None:
        import trackio

        self._facts = run
        self._run = trackio.init(
            **_project(run),
            name=run.run_id or run.name,
            space_id=run.space_id,
            config=run.config,
            resume="allow" if run.run_id else "never",
            embed=False,
        )
        self.run_id = self._run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run and publish it to its static Space."""
        was_open, run = self._run is not None, self._facts
        super().close()
        if not was_open or run.static_space_id is None:
            return
        import trackio

        if run.space_id is None:
            trackio.sync(**_project(run), sdk="static", space_id=run.static_space_id, force=True)
        else:
            spaces = {"space_id": run.space_id, "new_space_id": run.static_space_id}
            trackio.freeze(**spaces, project=run.project, private=run.is_private)


def _project(run: RunFacts) -> dict[str, Any]:
    # Older versions do not accept a bucket.
    bucket = {} if run.bucket_id is None else {"bucket_id": run.bucket_id}
    return {"project": run.project, "private": run.is_private, **bucket}
