"""Neptune."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.core.errors import ConfigError, explain, suggest
from hftrain.loggers.base import Logger, RunFacts

_UPLOADS = {None: "no", "last": "end", "best": "end", "same": "checkpoint"}


class NeptuneLogger(Logger):
    """Report to Neptune. Its service has ended, its package still writes runs offline (``NEPTUNE_MODE=offline``).

    Args:
        api_token: None takes NEPTUNE_API_TOKEN.
        project: None takes NEPTUNE_PROJECT.
        name: None takes `run_name`.
        base_namespace: What names in the run start with.
        run: A run of your own; it is not stopped.
        log_parameters: Record the settings.
        log_checkpoints: Upload ``"same"`` (each checkpoint), ``"last"`` or ``"best"`` (at the end), or None.
        **neptune_run_kwargs: For `neptune.init_run`.

    Raises:
        ConfigError: `log_checkpoints` has another value.

    Source: the documented `NeptuneCallback`.
    """

    name = "neptune"
    packages = ("neptune",)

    def __init__(
        self,
        *,
        api_token: str | None = None,
        project: str | None = None,
        name: str | None = None,
        base_namespace: str = "finetuning",
        run: Any = None,
        log_parameters: bool = True,
        log_checkpoints: str | None = None,
        **neptune_run_kwargs: Any,
    ) -> None:
        if log_checkpoints not in _UPLOADS:
            hint = suggest(str(log_checkpoints), [known for known in _UPLOADS if known])
            raise ConfigError(explain(f"log_checkpoints={log_checkpoints!r} was given.", "", hint))
        self.artifacts = _UPLOADS[log_checkpoints]
        self._options = {"api_token": api_token, "project": project, **neptune_run_kwargs}
        self._label = name
        self._base = base_namespace
        self._run = run
        self._is_own = run is None
        self._records_parameters = log_parameters

    def start(self, run: RunFacts) -> None:
        """Start or continue a run; record the settings."""
        import neptune
        from neptune.utils import stringify_unsupported

        if self._is_own:
            known = {"with_id": run.run_id} if run.run_id else {"name": self._label or run.name}
            self._run = neptune.init_run(**known, **self._options)
        self.run_id = self._run["sys/id"].fetch() if self._run.exists("sys/id") else None
        if self._records_parameters:
            self._run[f"{self._base}/trainer_parameters"] = stringify_unsupported(dict(run.hparams))
            if run.model_config:
                self._run[f"{self._base}/model_config"] = stringify_unsupported(dict(run.model_config))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append to a series for each metric."""
        for name, value in metrics.items():
            self._run[f"{self._base}/{name}"].append(value, step=step)

    def log_artifact(self, folder: Path, step: int) -> None:
        """Upload a checkpoint's files."""
        for path in folder.rglob("*"):
            if path.is_file():
                target = f"{self._base}/checkpoints/{folder.name}/{path.relative_to(folder).as_posix()}"
                self._run[target].upload(str(path), wait=True)

    def finish_training(self) -> None:
        """Wait for what is on its way."""
        self._run.wait()

    def close(self) -> None:
        """Stop the run."""
        if self._is_own and self._run is not None:
            self._run.stop()
            self._run = None
