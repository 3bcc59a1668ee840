"""MLflow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.core.errors import ConfigError
from hftrain.core.log import get_logger
from hftrain.loggers.base import Logger, RunFacts, flatten, is_set

logger = get_logger(__name__)


class MLflowLogger(Logger):
    """Report to MLflow, in the active run if there is one.

    Environment variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID (the run to continue),
    MLFLOW_NESTED_RUN (a child of the active run), MLFLOW_TAGS (JSON), MLFLOW_FLATTEN_PARAMS (nested settings one by
    one), MLFLOW_MAX_LOG_PARAMS, HF_MLFLOW_LOG_ARTIFACTS (upload each checkpoint), DISABLE_MLFLOW_INTEGRATION.

    Source: the documented `MLflowCallback`.
    """

    name = "mlflow"
    packages = ("mlflow",)
    replaces = ("azure_ml",)
    off_switch = "DISABLE_MLFLOW_INTEGRATION"
    uploads = ("HF_MLFLOW_LOG_ARTIFACTS", {"true": "checkpoint"})

    def start(self, run: RunFacts) -> None:
        """Start or join a run; record the settings as parameters, in batches that MLflow accepts."""
        import mlflow

        is_nested = is_set("MLFLOW_NESTED_RUN")
        self._is_own = mlflow.active_run() is None or is_nested
        if self._is_own:
            if os.environ.get("MLFLOW_EXPERIMENT_NAME"):
                mlflow.set_experiment(os.environ["MLFLOW_EXPERIMENT_NAME"])
            run_id = run.run_id or os.environ.get("MLFLOW_RUN_ID")
            mlflow.start_run(run_id=run_id, run_name=None if run_id else run.name, nested=is_nested)
        active: Any = mlflow.active_run()
        self.run_id = active.info.run_id
        if tags := _tags():
            mlflow.set_tags(tags)
        self._log_params(run, recorded=active.data.params)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        import mlflow

        mlflow.log_metrics(dict(metrics), step=step, run_id=self.run_id)

    def log_image(self, name: str, image: Any, step: int) -> None:
        self._client().log_image(str(self.run_id), image, key=name, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self._client().log_text(str(self.run_id), text, f"{name}/{step}.txt")

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        data = {column: [row[index] for row in rows] for index, column in enumerate(columns)}
        self._client().log_table(str(self.run_id), data, f"{name}/{step}.json")

    def log_artifact(self, folder: Path, step: int) -> None:
        import mlflow

        mlflow.log_artifacts(str(folder), artifact_path=folder.name, run_id=self.run_id)

    def finish_training(self) -> None:
        """End the run if this logger started it and it is still active; MLflow also takes later metrics by its ID."""
        import mlflow

        active: Any = mlflow.active_run()
        if self._is_own and active is not None and active.info.run_id == self.run_id:
            mlflow.end_run()
        self._is_own = False

    close = finish_training

    def _client(self) -> Any:
        import mlflow

        return mlflow.MlflowClient()

    def _log_params(self, run: RunFacts, *, recorded: Mapping[str, Any]) -> None:
        """Record new parameters; MLflow does not allow changes, so a resumed run keeps its recorded values."""
        import mlflow
        from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH, MAX_PARAMS_TAGS_PER_BATCH

        params = flatten(run.config) if is_set("MLFLOW_FLATTEN_PARAMS") else run.config
        params = {name: str(value) for name, value in params.items() if name not in recorded}
        too_long = sorted(name for name, value in params.items() if len(value) > MAX_PARAM_VAL_LENGTH)
        if too_long:
            logger.warning(
                "MLflow takes parameters of %d characters; longer and not recorded: %s. "
                "MLFLOW_FLATTEN_PARAMS=true records nested ones one by one.",
                MAX_PARAM_VAL_LENGTH,
                ", ".join(too_long),
            )
        items = [item for item in params.items() if item[0] not in too_long]
        items = items[: int(os.environ.get("MLFLOW_MAX_LOG_PARAMS") or len(items))]
        for start in range(0, len(items), MAX_PARAMS_TAGS_PER_BATCH):
            mlflow.log_params(dict(items[start : start + MAX_PARAMS_TAGS_PER_BATCH]), run_id=self.run_id)


def _tags() -> dict[str, Any]:
    text = os.environ.get("MLFLOW_TAGS") or "{}"
    try:
        return dict(json.loads(text))
    except (ValueError, TypeError) as error:
        reason = f"It is not a JSON object: {error}."
        raise ConfigError(f"MLFLOW_TAGS={text!r} is set.", reason, 'Write it as {"key": "value"}.') from error
