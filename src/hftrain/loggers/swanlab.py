"""SwanLab."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hftrain.core.log import warn_once
from hftrain.loggers.base import Logger, RunFacts


class SwanLabLogger(Logger):
    """Report to SwanLab, in the run that is open if there is one.

    Environment variables: SWANLAB_PROJECT, SWANLAB_RUN_ID and SWANLAB_RESUME (the run to go on with), SWANLAB_LOG_DIR;
    SwanLab itself reads SWANLAB_MODE, SWANLAB_API_KEY, SWANLAB_API_HOST and SWANLAB_WEB_HOST. SWANLAB_LOG_MODEL is
    warned of: there are no model artifacts.

    Source: the documented `SwanLabCallback`.
    """

    name = "swanlab"
    packages = ("swanlab",)

    def __init__(self) -> None:
        self._run: Any = None
        self._is_own = False
        if os.environ.get("SWANLAB_LOG_MODEL", "false").lower() not in ("", "0", "false", "none"):
            warn_once("SWANLAB_LOG_MODEL is set, but SwanLab keeps no models: none is uploaded.")

    @classmethod
    def why_off(cls) -> str | None:
        """Name SWANLAB_MODE where it says so."""
        return "SWANLAB_MODE=disabled is set" if os.environ.get("SWANLAB_MODE") == "disabled" else None

    def start(self, run: RunFacts) -> None:
        """Start, continue or join a run; record the settings."""
        # SwanLab 0.10 stumbles over the documented variable: it reads it as settings in JSON.
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
            swanlab.init(
                project=project,
                name=run.name,
                log_dir=os.environ.get("SWANLAB_LOG_DIR"),
                **known,
            )
        self._run = swanlab.get_run()
        self.run_id = self._run.id
        self._run.config.update(run.config)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record metrics."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run."""
        import swanlab

        if self._run is not None and self._is_own and swanlab.has_run():
            self._run.finish()
        self._run = None
