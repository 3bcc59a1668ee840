"""SwanLab."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hftrain.core.log import warn_once
from hftrain.loggers.base import MediaByWrapping, RunFacts


class SwanLabLogger(MediaByWrapping):
    """Report to SwanLab, in the open run if there is one.

    Environment variables: SWANLAB_PROJECT, SWANLAB_RUN_ID and SWANLAB_RESUME (the run to continue), SWANLAB_LOG_DIR;
    SwanLab itself reads SWANLAB_MODE, SWANLAB_API_KEY, SWANLAB_API_HOST and SWANLAB_WEB_HOST. SWANLAB_LOG_MODEL only
    causes a warning, because SwanLab has no model artifacts.

    Source: the documented `SwanLabCallback`.
    """

    name = "swanlab"
    packages = ("swanlab",)
    off_switch = "SWANLAB_MODE=disabled"

    def __init__(self) -> None:
        if os.environ.get("SWANLAB_LOG_MODEL", "false").lower() not in ("", "0", "false", "none"):
            warn_once("SWANLAB_LOG_MODEL is set, but SwanLab keeps no models: none is uploaded.")

    def start(self, run: RunFacts) -> None:
        """Start, continue or join a run; record the settings."""
        # SwanLab 0.10 fails on the documented variable because it parses it as JSON settings.
        project = os.environ.pop("SWANLAB_PROJECT", None)
        try:
            self._start(run, project)
        finally:
            if project is not None:
                os.environ["SWANLAB_PROJECT"] = project

    def _start(self, run: RunFacts, project: str | None) -> None:
        import swanlab

        self._is_own = not swanlab.has_run()
        if self._is_own:
            run_id = run.run_id or os.environ.get("SWANLAB_RUN_ID")
            known = {"id": run_id, "resume": os.environ.get("SWANLAB_RESUME") or "allow"} if run_id else {}
            swanlab.init(project=project, name=run.name, log_dir=os.environ.get("SWANLAB_LOG_DIR"), **known)
        self._run = swanlab.get_run()
        self.run_id = self._run.id
        self._run.config.update(run.config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        import swanlab

        self.log({name: swanlab.echarts.Table().add(columns, rows)}, step)

    def close(self) -> None:
        """Finish the run, unless it is already finished."""
        import swanlab

        self._is_own = self._is_own and swanlab.has_run()
        super().close()
