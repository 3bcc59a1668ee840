"""Report to experiment trackers: one callback for each, named as documented."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from hftrain.callbacks.base import ExportableState, Metrics, TrainerCallback
from hftrain.core.log import get_logger, warn_once
from hftrain.core.state import TrainerControl, TrainerState
from hftrain.loggers.base import Logger, RunFacts, numbers_of, regroup
from hftrain.loggers.handed_on import HandedOnTracker
from hftrain.loggers.registry import create_logger, installed_tracker
from hftrain.storage.files import is_url, local_folder

logger = get_logger(__name__)


class TrackerCallback(TrainerCallback, ExportableState):
    """Report a run to one tracker, on the main process only.

    The tracker starts when training begins or at the first log, whichever comes first. It stays open after training, so
    later evaluations are reported to the same run. `close`, the next training (also of another Trainer) or deleting the
    callback closes it. A resumed run continues the tracker run named in the checkpoint. Errors of the tracker become
    warnings.

    Args:
        *args: Passed to the tracker's logger.
        logger: The logger to use instead of creating one.
        **kwargs: Passed to the tracker's logger.

    Raises:
        MissingDependencyError: The tracker's package is not installed.
    """

    tracker: ClassVar[str] = ""
    by_tracker: ClassVar[dict[str, type[TrackerCallback]]] = {}
    # By tracker: whose training began last. Most trackers have one current run per process, which a new one would join.
    _last: ClassVar[dict[str, weakref.ref[TrackerCallback]]] = {}
    # A logger cannot be rebuilt from a checkpoint.
    is_rebuilt = False

    def __init_subclass__(cls, *, tracker: str | None = None, **kwargs: Any) -> None:
        """Register the class as the callback of a tracker; subclasses have the same tracker."""
        super().__init_subclass__(**kwargs)
        if tracker is not None:
            cls.tracker = tracker
            cls.by_tracker[tracker] = cls

    def __init__(self, *args: Any, logger: Logger | None = None, **kwargs: Any) -> None:
        self.logger = create_logger(self.tracker, *args, **kwargs) if logger is None else logger
        self.run_id: str | None = None
        self._folder = Path.cwd()
        self._is_open = self._is_broken = self._has_trained = self._is_training = False
        self._num_failed = 0
        self._last_checkpoint: tuple[Path, int] | None = None
        self._finalizer: Any = None

    @staticmethod
    def rename(metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics under the names reported to the tracker."""
        return regroup(metrics)

    def state(self) -> dict[str, Any]:
        """Return the ID needed to continue the tracker run."""
        return {"args": {}, "attributes": {"run_id": self.run_id}}

    def setup(self, args: Any, state: TrainerState, model: Any = None, **kwargs: Any) -> None:
        """Start the tracker's run; override it to do more.

        Source: the documented `setup` of the integrations.
        """
        config: Any = getattr(model, "config", None)
        settings = config.to_dict() if hasattr(config, "to_dict") else config
        output_dir = str(args.output_dir)
        facts = {
            "name": str(args.run_name),
            # For a remote folder, its local mirror, because trackers append to their files.
            "output_dir": str(local_folder(output_dir, start=self._folder)),
            "logging_dir": args.logging_dir,
            "project": args.project,
            "space_id": args.trackio_space_id,
            "bucket_id": args.trackio_bucket_id,
            "static_space_id": args.trackio_static_space_id or None,
            "is_private": args.hub_private_repo,
            "hparams": args.to_sanitized_dict(),
            "model_config": dict(settings) if isinstance(settings, Mapping) else {},
            "model": model,
            "log_every": state.logging_steps,
            "step": state.global_step,
        }
        previous_id = self.run_id
        try:
            self.logger.start(RunFacts(**facts, run_id=previous_id))
        except Exception as error:
            if previous_id is None:
                raise
            logger.warning("Tracker %s cannot continue run %s: %s", self._name, previous_id, _reason(error))
            self.logger.start(RunFacts(**facts))
        self.run_id = self.logger.run_id
        if state.global_step > 0 and (previous_id is None or self.run_id != previous_id):
            logger.warning("Tracker %s starts a new run for the resumed training.", self._name)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start a tracker run, or continue the one named in the checkpoint."""
        if not state.is_world_process_zero:
            return
        is_resumed = state.global_step > 0
        is_another = self.run_id != self.logger.run_id if is_resumed else self._has_trained
        if self._is_open and is_another:
            self.close()
        if self._has_trained and not is_resumed:
            self.run_id = None
        last = self._last.get(self._name, lambda: None)()
        if last is not None and last is not self and not last._is_training:
            last.close()
        self._last[self._name] = weakref.ref(self)
        self._is_broken, self._has_trained, self._num_failed, self._last_checkpoint = False, True, 0, None
        self._is_training = True
        self._open(args, state, kwargs.get("model"))

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Metrics = None, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and logs and self._open(args, state, kwargs.get("model")):
            self._try(self.logger.log, self.rename(numbers_of(logs)), state.global_step)

    def report_logged(self, kind: str, args: Any, state: TrainerState, model: Any, *values: Any) -> None:
        """Report what a callback logs; `kind` is the logger's method."""
        method = getattr(self.logger, kind)
        if kind == "log":
            self.on_log(args, state, TrainerControl(), logs=values[0], model=model)
        elif getattr(type(self.logger), kind) is getattr(Logger, kind):
            warn_once(f"Tracker {self._name} has no {kind}: what callbacks log with it is not reported there.")
        elif self._open(args, state, model):
            self._try(method, *values, state.global_step)

    def on_predict(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Metrics = None, **kwargs: Any
    ) -> None:
        self.on_log(args, state, control, logs=metrics, **kwargs)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Upload the checkpoint if every checkpoint is to be uploaded."""
        if not state.is_world_process_zero or self.logger.artifacts == "no":
            return
        folder = local_folder(args.output_dir, start=self._folder)
        self._last_checkpoint = folder / f"checkpoint-{state.global_step}", state.global_step
        if self.logger.artifacts == "checkpoint" and self._is_open:
            self._try(self.logger.log_artifact, *self._last_checkpoint)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Upload the best or last checkpoint if requested, and flush the tracker."""
        if not self._is_open:
            return
        if self.logger.artifacts == "end":
            self._upload_last(args, state)
        self._try(self.logger.finish_training)
        if self._num_failed > 1:
            logger.warning("Tracker %s failed %d times and lacks those entries.", self._name, self._num_failed)

    def close_run(self) -> None:
        """Let the next training, also of another Trainer, end the tracker's run; called after errors too."""
        self._is_training = False

    def close(self) -> None:
        """End the tracker's run; a later log continues or starts one."""
        if self._is_open:
            self._finalizer.detach()
            self._is_open = False
            self._try(self.logger.close)

    @property
    def _name(self) -> str:
        return self.logger.name or type(self.logger).__name__

    def _open(self, args: Any, state: TrainerState, model: Any) -> bool:
        """Start the run, unless it is open or could not be started before."""
        if not self._is_open and not self._is_broken:
            self._is_open = self._try(self.setup, args, state, model)
            self._is_broken = not self._is_open
            if self._is_open:
                self._finalizer = weakref.finalize(self, _close, self.logger)
            else:
                _close(self.logger)
        return self._is_open

    def _upload_last(self, args: Any, state: TrainerState) -> None:
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        if best and is_url(best):
            best = str(local_folder(args.output_dir, start=self._folder) / Path(best).name)
        folder, step = (Path(best), state.best_global_step or 0) if best else self._last_checkpoint or (None, 0)
        if folder is None:
            logger.warning("Tracker %s uploads no model: no checkpoint was saved.", self._name)
        else:
            self._try(self.logger.log_artifact, folder, step)

    def _try(self, call: Callable[..., Any], *args: Any) -> bool:
        """Call the tracker; the first failure causes a warning with its reason, and training continues."""
        try:
            call(*args)
        except Exception as error:
            self._num_failed += 1
            if self._num_failed == 1:
                failure = f"Tracker {self._name} failed ({call.__name__}): {_reason(error)}"
                logger.warning("%s Training continues.", failure)
            return False
        return True


def _close(logger: Logger) -> None:
    """Close a logger when its callback is deleted or the process ends; failures are logged as INFO."""
    try:
        logger.close()
    except Exception as error:
        get_logger(__name__).info("Tracker %s could not be closed: %r", logger.name, error)


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" + ("" if text.endswith(".") else ".")


def reports_to_tracker(kind: type) -> bool:
    """Return whether callbacks of a class report to a tracker; those of transformers' integrations do too."""
    return issubclass(kind, TrackerCallback) or any(
        base.__module__.startswith("transformers.integrations.") for base in kind.__mro__
    )


def tracker_callback(logger: Logger | str) -> Any:
    """Return the callback of a tracker, given by its name or as a logger; each tracker has its own class.

    For a tracker that only transformers reports to, it is the class of transformers' callback.
    """
    name = logger if isinstance(logger, str) else logger.name or type(logger).__name__
    instance = None if isinstance(logger, str) else logger
    callback_class = TrackerCallback.by_tracker.get(name)
    if callback_class is not None:
        return callback_class(logger=instance)
    if instance is None:
        logger_class = installed_tracker(name)
        if isinstance(logger_class, type) and issubclass(logger_class, HandedOnTracker):
            return logger_class.callback_class()
        instance = create_logger(name)
    title = "".join(word[:1].upper() + word[1:] for word in name.replace("-", "_").split("_"))
    # A separate class, so that states in checkpoints and `remove_callback` can distinguish trackers.
    body = {"__doc__": f"Report to {name}.", "__qualname__": f"tracker_callback.<locals>.{title}Callback"}
    subclass: type[TrackerCallback] = type(f"{title}Callback", (TrackerCallback,), body)
    subclass.tracker, subclass.by_tracker[name] = name, subclass
    return subclass(logger=instance)


class ClearMLCallback(TrackerCallback, tracker="clearml"):
    """Report to ClearML; see `hftrain.loggers.accelerate`."""


class CometCallback(TrackerCallback, tracker="comet_ml"):
    """Report to Comet; see `hftrain.loggers.accelerate`."""


class DVCLiveCallback(TrackerCallback, tracker="dvclive"):
    """Report to DVCLive; see `hftrain.loggers.accelerate`."""


class MLflowCallback(TrackerCallback, tracker="mlflow"):
    """Report to MLflow; see `hftrain.loggers.mlflow`."""


class SwanLabCallback(TrackerCallback, tracker="swanlab"):
    """Report to SwanLab; see `hftrain.loggers.accelerate`."""


class TensorBoardCallback(TrackerCallback, tracker="tensorboard"):
    """Report to TensorBoard; see `hftrain.loggers.tensorboard`."""


class TrackioCallback(TrackerCallback, tracker="trackio"):
    """Report to Trackio; see `hftrain.loggers.trackio`."""


class WandbCallback(TrackerCallback, tracker="wandb"):
    """Report to Weights & Biases; see `hftrain.loggers.wandb`."""
