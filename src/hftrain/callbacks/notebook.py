"""Progress in a notebook: one live HTML block with bars and a table of metrics."""

from __future__ import annotations

import html
import importlib
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hftrain.callbacks.base import Metrics
from hftrain.callbacks.lines import shorten
from hftrain.callbacks.meters import Meter
from hftrain.callbacks.progress import MeterCallback
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


def render_html(meters: Iterable[Meter], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the HTML of the block; all texts are escaped."""
    parts = [_render_bar(meter) for meter in meters]
    if rows:
        columns = list(dict.fromkeys(name for row in rows for name in row))
        parts.append('<table border="1" class="dataframe"><thead>')
        parts.append(_render_row("th", columns))
        parts.append("</thead><tbody>")
        parts += [_render_row("td", [row.get(name, "") for name in columns]) for row in rows]
        parts.append("</tbody></table>")
    return "<div>" + "".join(parts) + "</div>"


def _render_bar(meter: Meter) -> str:
    limits = f' value="{meter.n}" max="{meter.total}"' if meter.total else ""
    text = html.escape(meter.text(None))
    return f'<p><progress{limits} style="width: 300px; height: 20px"></progress> {text}</p>'


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


def show_in_ipython(block: str, *, display_id: str, is_update: bool) -> None:
    """Show HTML through IPython; an update replaces the earlier block."""
    ipython = importlib.import_module("IPython.display")
    show = ipython.update_display if is_update else ipython.display
    show(ipython.HTML(block), display_id=display_id)


class NotebookProgressCallback(MeterCallback):
    """Show bars and a table with a row per evaluation (or per log entry, without evaluations) in a notebook.

    Args:
        show: Puts HTML on the page, with the arguments of `show_in_ipython`, the default.

    Raises:
        MissingDependencyError: IPython is needed and not installed.

    Source: the documented `NotebookProgressCallback`.
    """

    _loss: Any

    def __init__(self, *, show: Callable[..., None] | None = None) -> None:
        if show is None:
            require("ipython", feature="NotebookProgressCallback")
        self._show = show or show_in_ipython
        self._begin_block()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start a new block below the earlier ones."""
        self._begin_block()
        super().on_train_begin(args, state, control, **kwargs)
        if state.is_world_process_zero:
            self._draw()

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
        super().on_evaluate(args, state, control, **kwargs)
        self._add_row(args, state, metric_columns(metrics or {}))

    def _begin_block(self) -> None:
        self._rows: list[dict[str, Any]] = []
        self._row_step = -1
        self._loss = "No log"
        self._display_id, self._is_shown = uuid.uuid4().hex, False

    def _add_row(self, args: Any, state: TrainerState, columns: Mapping[str, Any]) -> None:
        if not state.is_world_process_zero:
            return
        is_by_epoch = args.eval_strategy == "epoch"
        start = {"Epoch": round(state.epoch or 0.0, 2)} if is_by_epoch else {"Step": state.global_step}
        if self._row_step != state.global_step or not self._rows:
            self._rows.append({})
            self._row_step = state.global_step
        self._rows[-1].update({**start, "Training Loss": self._loss, **columns})
        self._draw()

    def _open(self, name: str, total: int | None, *, initial: int = 0, unit: str, leave: bool = True) -> Meter:
        page = SimpleNamespace(refresh=self._draw, clear=bool, close=self._draw)
        return Meter(name, total, initial=initial, unit=unit, file=sys.stdout, draw=lambda _: page, refresh_s=REFRESH_S)

    def _draw(self) -> None:
        is_update, self._is_shown = self._is_shown, True
        self._show(render_html(self._meters, self._rows), display_id=self._display_id, is_update=is_update)
