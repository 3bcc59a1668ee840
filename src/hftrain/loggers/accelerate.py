"""Comet, ClearML, DVCLive and SwanLab, through the tracker classes of `accelerate.tracking`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hftrain.core.launcher import announce_launch
from hftrain.core.log import warn_once
from hftrain.loggers.base import Logger, MediaByWrapping, RunFacts

_COMET_ONLINE = {"ONLINE": True, "OFFLINE": False}


class AccelerateLogger(Logger):
    """Report through a tracker class of accelerate, which subclasses name.

    Attributes:
        tracker_class: The name of the class in `accelerate.tracking`.
        run_attribute: The attribute in which that class keeps the tracker's run object.
        id_attribute: The attribute of the run object that continues the run after a resume.
    """

    tracker_class: ClassVar[str] = ""
    run_attribute: ClassVar[str] = ""
    id_attribute: ClassVar[str] = "id"
    _tracker: Any = None

    def start(self, run: RunFacts) -> None:
        from accelerate import PartialState, tracking

        # The trackers write to accelerate's log, which needs the state of the processes.
        announce_launch()
        devices = None if run.model is None else {parameter.device.type for parameter in run.model.parameters()}
        PartialState(cpu=devices is not None and devices <= {"cpu"})
        self._tracker = getattr(tracking, self.tracker_class)(**self._options(run))
        open_run = self._find_open_run()
        self._is_own = open_run is None
        if open_run is None:
            self._tracker.start()
        else:
            setattr(self._tracker, self.run_attribute, open_run)
        self._run = self._tracker.tracker
        self.run_id = str(getattr(self._run, self.id_attribute))
        self._record(run)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        if self._run is not None and self._is_own:
            self._run = None
            self._tracker.finish()

    def _find_open_run(self) -> Any:
        """Return the run object that the user has opened; None without one."""

    def _options(self, run: RunFacts) -> dict[str, Any]:
        """Return the arguments of the tracker class; it takes the project as `run_name`."""
        raise NotImplementedError

    def _record(self, run: RunFacts) -> None:
        self._tracker.store_init_configuration(run.config)


class ClearMLLogger(AccelerateLogger):
    """Report to ClearML, in the current task if one exists.

    Environment variables: CLEARML_PROJECT (``"HuggingFace Transformers"``), CLEARML_TASK (``"Trainer"``),
    CLEARML_LOG_MODEL (upload each checkpoint); ClearML itself reads CLEARML_OFFLINE_MODE and its other variables.

    Source: the documented `ClearMLCallback`.
    """

    name = "clearml"
    packages = ("clearml",)
    uploads = ("CLEARML_LOG_MODEL", {"true": "checkpoint"})
    tracker_class = "ClearMLTracker"
    run_attribute = "task"

    def _find_open_run(self) -> Any:
        from clearml import Task

        return Task.current_task()

    def _options(self, run: RunFacts) -> dict[str, Any]:
        return {
            "project_name": os.environ.get("CLEARML_PROJECT", "HuggingFace Transformers"),
            "task_name": os.environ.get("CLEARML_TASK", "Trainer"),
            # These would send everything twice or upload files that the user did not request.
            "auto_connect_frameworks": {"tensorboard": False, "pytorch": False},
            "reuse_last_task_id": False,
            "continue_last_task": run.run_id or False,
        }

    def _record(self, run: RunFacts) -> None:
        # As hyperparameters, which ClearML compares and searches; accelerate writes one text.
        self._run.connect(dict(run.hparams), name="Args")
        if run.model_config:
            self._run.connect(dict(run.model_config), name="Model Configuration")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add to one plot per metric, with one line per stage."""
        super().log({name.replace("/", "_", 1): value for name, value in metrics.items()}, step)

    def log_image(self, name: str, image: Any, step: int) -> None:
        self._tracker.log_images({name: image}, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self._run.get_logger().report_text(f"{name} (step {step}): {text}")

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        self._tracker.log_table(name, columns=columns, data=rows, step=step)

    def log_artifact(self, folder: Path, step: int) -> None:
        self._run.upload_artifact(folder.name, artifact_object=str(folder), wait_on_upload=True)

    def finish_training(self) -> None:
        self._run.flush()


class CometLogger(AccelerateLogger):
    """Report to Comet, in the running experiment if there is one.

    Environment variables: COMET_PROJECT_NAME (``"huggingface"``), COMET_MODE (``"ONLINE"``, ``"OFFLINE"``,
    ``"DISABLED"``), COMET_LOG_ASSETS (upload the last checkpoint); Comet itself reads COMET_START_MODE,
    COMET_START_ONLINE, COMET_EXPERIMENT_KEY, COMET_API_KEY, COMET_OFFLINE_DIRECTORY and its other variables.

    Source: the documented `CometCallback`.
    """

    name = "comet_ml"
    packages = ("comet_ml",)
    off_switch = "COMET_MODE=DISABLED"
    uploads = ("COMET_LOG_ASSETS", {"true": "end"})
    tracker_class = "CometMLTracker"
    run_attribute = "writer"

    def _find_open_run(self) -> Any:
        import comet_ml

        return comet_ml.get_running_experiment()

    def _options(self, run: RunFacts) -> dict[str, Any]:
        options: dict[str, Any] = {"experiment_key": run.run_id} if run.run_id else {}
        mode = os.environ.get("COMET_MODE", "").upper()
        if mode in _COMET_ONLINE:
            options["online"] = _COMET_ONLINE[mode]
        return {"run_name": os.environ.get("COMET_PROJECT_NAME", "huggingface"), **options}

    def _record(self, run: RunFacts) -> None:
        if self._is_own:
            self._run.set_name(run.name)
        parts = {"args": run.hparams, "config": run.model_config}
        settings = {f"{part}_{name}": value for part, values in parts.items() for name, value in values.items()}
        self._tracker.store_init_configuration(settings)

    def log_image(self, name: str, image: Any, step: int) -> None:
        self._run.log_image(image, name=name, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        self._run.log_text(text, step=step, metadata={"name": name})

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        self._run.log_table(f"{name}-{step}.csv", tabular_data=rows, headers=columns)

    def log_artifact(self, folder: Path, step: int) -> None:
        self._run.log_asset_folder(str(folder), step=step, log_file_name=True, recursive=True)
        self._run.flush()

    def finish_training(self) -> None:
        self._run.flush()


class DVCLiveLogger(AccelerateLogger):
    """Write metrics, parameters and plots as DVCLive files.

    Environment variables: HF_DVCLIVE_LOG_MODEL: true records the last checkpoint in DVC, ``"all"`` each one.

    Args:
        live: An existing `Live` to use; it is not ended.
        log_model: True or ``"all"``, as the variable; takes precedence over it.
        **kwargs: Passed to `Live`.

    Source: the documented `DVCLiveCallback`.
    """

    name = "dvclive"
    packages = ("dvclive",)
    uploads = ("HF_DVCLIVE_LOG_MODEL", {"true": "end", "all": "checkpoint"})
    tracker_class = "DVCLiveTracker"
    run_attribute = "live"
    id_attribute = "dir"

    def __init__(self, live: Any = None, log_model: str | bool | None = None, **kwargs: Any) -> None:
        if log_model is None:
            super().__init__()
        else:
            self.artifacts = {"all": "checkpoint", True: "end"}.get(log_model, "no")
        self._live, self._live_options = live, kwargs

    def _find_open_run(self) -> Any:
        return self._live

    def _options(self, run: RunFacts) -> dict[str, Any]:
        return {"resume": run.run_id is not None, **self._live_options}

    def _record(self, run: RunFacts) -> None:
        self._tracker.store_init_configuration({name: value for name, value in run.config.items() if value is not None})

    def log_image(self, name: str, image: Any, step: int) -> None:
        self._run.log_image(f"{name}/{step}.png", image)

    def log_artifact(self, folder: Path, step: int) -> None:
        """Record a checkpoint in DVC, as a copy."""
        self._run.log_artifact(str(folder), name="model", type="model", copy=True)


class SwanLabLogger(AccelerateLogger, MediaByWrapping):
    """Report to SwanLab, in the open run if there is one.

    Environment variables: SWANLAB_PROJECT, SWANLAB_RUN_ID and SWANLAB_RESUME (the run to continue), SWANLAB_LOG_DIR;
    SwanLab itself reads SWANLAB_MODE, SWANLAB_API_KEY, SWANLAB_API_HOST and SWANLAB_WEB_HOST. SWANLAB_LOG_MODEL only
    causes a warning, because SwanLab has no model artifacts.

    Source: the documented `SwanLabCallback`.
    """

    name = "swanlab"
    packages = ("swanlab",)
    off_switch = "SWANLAB_MODE=disabled"
    tracker_class = "SwanLabTracker"
    run_attribute = "run"

    def __init__(self) -> None:
        if os.environ.get("SWANLAB_LOG_MODEL", "false").lower() not in ("", "0", "false", "none"):
            warn_once("SWANLAB_LOG_MODEL is set, but SwanLab keeps no models: none is uploaded.")

    def start(self, run: RunFacts) -> None:
        # SwanLab 0.10 fails on the documented variable because it parses it as JSON settings.
        self._project = os.environ.pop("SWANLAB_PROJECT", None)
        try:
            super().start(run)
        finally:
            if self._project is not None:
                os.environ["SWANLAB_PROJECT"] = self._project

    def _find_open_run(self) -> Any:
        import swanlab

        return swanlab.get_run() if swanlab.has_run() else None

    def _options(self, run: RunFacts) -> dict[str, Any]:
        run_id = run.run_id or os.environ.get("SWANLAB_RUN_ID")
        continued = {"id": run_id, "resume": os.environ.get("SWANLAB_RESUME") or "allow"} if run_id else {}
        return {"run_name": self._project, "name": run.name, "log_dir": os.environ.get("SWANLAB_LOG_DIR"), **continued}

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        import swanlab

        self.log({name: swanlab.echarts.Table().add(columns, rows)}, step)

    def close(self) -> None:
        """Finish the run, unless it is already finished."""
        self._is_own = self._is_own and self._find_open_run() is not None
        super().close()
