"""Progress in a notebook: one live HTML block with bars and a table of metrics."""

from __future__ import annotations

import html
import importlib
import operator
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tqdm import tqdm

from hftrain.callbacks.base import Metrics, TrainerCallback
from hftrain.callbacks.lines import shorten
from hftrain.callbacks.progress import stage_of
from hftrain.core.optional import require
from hftrain.core.progress import TrainerControl
from hftrain.core.state import TrainerState

REFRESH_S = 0.5
_UNSHOWN = ("total_flos", "epoch", "_runtime", "_per_second", "_compilation_time")


def in_notebook() -> bool:
    """Return whether this process is a notebook's kernel; never imports IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


@dataclass(kw_only=True)
class Bar:
    """A progress count.

    Args:
        total: The final count; None if unknown.
        started_s: When it started, on `time.monotonic`'s clock.
    """

    label: str
    total: int | None
    initial: int = 0
    n: int = 0
    started_s: float = field(default_factory=time.monotonic)


def render_html(bars: Iterable[Bar], rows: Sequence[Mapping[str, Any]], *, now_s: float) -> str:
    """Return the HTML of the block; all texts are escaped."""
    parts = [_render_bar(bar, now_s) for bar in bars]
    if rows:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        parts.append('<table border="1" class="dataframe"><thead>')
        parts.append(_render_row("th", columns))
        parts.append("</thead><tbody>")
        parts += [_render_row("td", [row.get(name, "") for name in columns]) for row in rows]
        parts.append("</tbody></table>")
    return "<div>" + "".join(parts) + "</div>"


def _render_bar(bar: Bar, now_s: float) -> str:
    limits = f' value="{bar.n}" max="{bar.total}"' if bar.total else ""
    text = tqdm.format_meter(bar.n, bar.total or 0, now_s - bar.started_s, 0, bar.label, initial=bar.initial)
    return f'<p><progress{limits} style="width: 300px; height: 20px"></progress> {html.escape(text)}</p>'


def _render_row(tag: str, cells: Iterable[Any]) -> str:
    texts = (html.escape(str(shorten(cell, max_str_len=100))) for cell in cells)
    return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"


def metric_columns(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return an evaluation's metrics by display name, without timings; ``eval_loss`` is "Validation Loss".

    Example:
        >>> metric_columns({"eval_loss": 0.5, "eval_exact_match": 0.9, "eval_runtime": 3.0, "epoch": 1.0})
        {'Validation Loss': 0.5, 'Exact Match': 0.9}
    """
    shown = {name: value for name, value in metrics.items() if not name.endswith(_UNSHOWN)}
    titles = {"eval_loss": "Validation Loss"}
    return {
        titles.get(name, name.removeprefix("eval_").replace("_", " ").title()): value for name, value in shown.items()
    }


class Show(Protocol):
    """Put HTML on the page."""

    def __call__(self, block: str, *, display_id: str, is_update: bool) -> None:
        """Show `block`; an update replaces the last one with the same id."""


def show_in_ipython(block: str, *, display_id: str, is_update: bool) -> None:
    """Show HTML through IPython; an update replaces the earlier block."""
    ipython = importlib.import_module("IPython.display")
    show = ipython.update_display if is_update else ipython.display
    show(ipython.HTML(block), display_id=display_id)


class NotebookProgressCallback(TrainerCallback):
    """Show bars and a table with a row per evaluation (or per log entry, without evaluations) in a notebook.

    Args:
        show: Puts HTML on the page; through IPython by default.

    Raises:
        MissingDependencyError: IPython is needed and not installed.

    Source: the documented `NotebookProgressCallback`.
    """

    _training: Bar | None
    _prediction: Bar | None
    _loader: Any
    _loss: Any

    def __init__(self, *, show: Show | None = None) -> None:
        if show is None:
            require("ipython", feature="NotebookProgressCallback")
        self._show = show or show_in_ipython
        self._reset()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start a new block below the earlier ones."""
        self._reset()
        step = state.global_step
        self._training = Bar(label="train", total=state.max_steps, initial=step, n=step)
        self._draw(state, is_forced=True)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance the training bar."""
        if self._training is not None:
            self._training.n = state.global_step
            self._draw(state)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Advance the evaluation's bar; opens it at the first batch."""
        bar = self._prediction
        # An interrupted evaluation leaves its bar: detect it by another loader, or a batch beyond the total.
        if bar is None or bar.n == bar.total or self._loader is not eval_dataloader:
            self._prediction = bar = Bar(label=stage_of(kwargs), total=operator.length_hint(eval_dataloader) or None)
            self._loader = eval_dataloader
        bar.n += 1
        self._draw(state)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: Metrics = None, **kwargs: Any
    ) -> None:
        """Store the training loss, or add a row if the run has no evaluations."""
        if not logs or "loss" not in logs:
            return
        self._loss = logs["loss"]
        if args.eval_strategy == "no":
            self._add_row(args, state, {})

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: Metrics = None, **kwargs: Any
    ) -> None:
        """Add a row, or the columns of another evaluation set to the same row."""
        self._prediction = self._loader = None
        self._add_row(args, state, metric_columns(metrics or {}))

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Remove the prediction's bar."""
        self._prediction = self._loader = None
        self._draw(state, is_forced=True)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Draw the final state."""
        self._draw(state, is_forced=True)
        self._training = None

    def _reset(self) -> None:
        self._training = None
        self._prediction = self._loader = None
        self._rows: list[dict[str, Any]] = []
        self._row_step = -1
        self._loss = "No log"
        self._display_id = uuid.uuid4().hex
        self._drawn_s: float | None = None

    def _add_row(self, args: Any, state: TrainerState, columns: Mapping[str, Any]) -> None:
        is_by_epoch = args.eval_strategy == "epoch"
        start = {"Epoch": round(state.epoch or 0.0, 2)} if is_by_epoch else {"Step": state.global_step}
        if self._row_step != state.global_step or not self._rows:
            self._rows.append({})
            self._row_step = state.global_step
        self._rows[-1].update({**start, "Training Loss": self._loss, **columns})
        self._draw(state, is_forced=True)

    def _draw(self, state: TrainerState, *, is_forced: bool = False) -> None:
        now = time.monotonic()
        is_early = self._drawn_s is not None and now - self._drawn_s < REFRESH_S
        if not state.is_world_process_zero or (is_early and not is_forced):
            return
        bars = [bar for bar in (self._training, self._prediction) if bar is not None]
        is_update, self._drawn_s = self._drawn_s is not None, now
        self._show(render_html(bars, self._rows, now_s=now), display_id=self._display_id, is_update=is_update)
