"""The summary at the end of a run: figures that the run has counted anyway."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hftrain.checkpoint.manifest import checkpoint_name
from hftrain.core.errors import listed
from hftrain.core.state import Progress
from hftrain.extras.progress.bars import Rows, SummaryCallback, log_texts, number_text, seconds_text
from hftrain.rules.evaluation import best_metric_key
from hftrain.run.parts import RunParts
from hftrain.run.saving import Saver


def show_summary(
    parts: RunParts,
    saver: Saver,
    metrics: Mapping[str, Any],
    *,
    first: Progress,
    resume: Path | None,
) -> None:
    """Pass the summary to the callback that shows it; if there is none, compute nothing."""
    state, callbacks = parts.state, parts.events.callbacks
    displays: list[Any] = [callback for callback in callbacks if isinstance(callback, SummaryCallback)]
    if not displays and not state.is_hyper_param_search:
        displays = [callback for callback in callbacks if getattr(callback, "shows_summary", False)]
    if not state.is_world_process_zero or not displays:
        return
    num_steps = parts.progress.step - first.step
    title = f"Trained {num_steps} steps in {seconds_text(metrics['train_runtime'])}"
    rows: Rows = {"speed": log_texts({name: metrics[name] for name in metrics if name.endswith("_per_second")})}
    if limits := parts.trainer.limits.facts:
        rows["limited"] = [f"{name}={value}" for name, value in limits.items()]
    if resume is not None:
        rows["resumed"] = [f"from {_relative_path(resume)}"]
    if state.global_step < state.max_steps:
        rows["stopped"] = [f"at step {state.global_step} of {state.max_steps}: {_stop_reason(callbacks)}"]
    rows.update(_best_and_last(parts, saver))
    rows.update(_unusual_events(parts, saver))
    displays[0].show_summary(title, rows)


def _best_and_last(parts: RunParts, saver: Saver) -> Rows:
    """Return the best evaluation, and the best and the last checkpoint; these only where they are still there."""
    rows: Rows = {}
    state, metric_name = parts.state, parts.args.metric_for_best_model
    if state.best_metric is not None and state.best_global_step is not None and metric_name:
        metric = f"{best_metric_key(metric_name)} {number_text(state.best_metric)}"
        rows["best evaluation"] = [f"step {state.best_global_step}", metric]
    best, step = parts.best_checkpoint(), saver.saved_step
    if best is not None and best.is_dir():
        rows["best checkpoint"] = [f"{_relative_path(best)}{' (loaded)' * bool(parts.args.load_best_model_at_end)}"]
    last = None if step is None else parts.output.folder / checkpoint_name(step)
    if last is not None and last.is_dir() and last != best:
        rows["last checkpoint"] = [_relative_path(last)]
    return rows


def _unusual_events(parts: RunParts, saver: Saver) -> Rows:
    rows: Rows = {}
    if parts.losses.num_nonfinite:
        rows["NaN or infinite"] = [f"{parts.losses.num_nonfinite} training losses"]
    num_skipped = parts.precision.logs().get("skipped_steps", 0)
    if num_skipped:
        rows["skipped updates"] = [f"{num_skipped:.0f}, whose gradients overflowed in {parts.precision.policy.name}"]
    nonfinite_steps, skipped = saver.contents.finiteness.found_steps, saver.writer.skipped_steps
    if nonfinite_steps:
        was_restored = parts.save_policy.on_nonfinite == "restore"
        outcome = "the last finite checkpoint was restored" if was_restored else "saved all the same"
        rows["not finite"] = [f"weights or losses at {_steps(nonfinite_steps)}: {outcome}"]
    if skipped:
        rows["not saved"] = [f"{_steps(skipped)}: the disk was full"]
    return rows


def _relative_path(path: Path) -> str:
    """Return a path as text, relative to the working directory if it is inside."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _steps(steps: list[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {listed(steps, most=5)}"


def _stop_reason(callbacks: list[Any]) -> str:
    for callback in callbacks:
        counter = getattr(callback, "early_stopping_patience_counter", 0)
        if counter and counter >= callback.early_stopping_patience:
            return f"no improvement in {counter} evaluations (early stopping)"
    return "a callback or the loop ended the run"
