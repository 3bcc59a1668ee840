"""`hftrain curves`: plot the logged metrics of runs over steps, in the terminal or as an image."""

from __future__ import annotations

import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path

from hftrain.cli.answer import Answer
from hftrain.cli.runs import FEW_RUNS, Point, RunRecord, chosen_metrics, read_runs, thinned
from hftrain.core.errors import ConfigError
from hftrain.core.extras import require

_ROWS = 16
_MAX_POINTS = 2000
# Markers that distinguish the curves without colours; "hd" draws quarters of a character.
_MARKERS = ("hd", "●", "x", "+", "o")
_PICTURES = (".png", ".svg", ".pdf")
# After ten curves colours repeat.
_LINES = ("-", "--", ":", "-.")
# Size of a panel in an image, in inches.
_SIZE = (7.0, 3.6)

# Panel title -> curve label -> points.
Panels = Mapping[str, Mapping[str, Sequence[Point]]]


def show_curves(runs: Sequence[str], *, metrics: Sequence[str] = (), output: str | None = None) -> Answer:
    """Plot the curves of runs, with comparable metrics in one panel.

    Args:
        metrics: Names of logged numbers; by default the losses of training and evaluation.
        output: An image file to write instead: ``.png``, ``.svg`` or ``.pdf``.

    Raises:
        ConfigError: A folder contains no run, no run has logged such a metric, or the image has another suffix.
        MissingDependencyError: The packages of the extra ``report`` are not installed.
    """
    records = read_runs(runs)
    panels = _panels(records, chosen_metrics(records, metrics))
    if output is None:
        require("plotext>=6", feature="hftrain curves", extra="report")
        width = shutil.get_terminal_size().columns
        is_colored = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        lines = [line for title, curves in panels.items() for line in _draw(title, curves, width, is_colored)]
    else:
        if Path(output).suffix.lower() not in _PICTURES:
            raise ConfigError(
                f"Cannot write {output!r}.", f"Its suffix is not one of {', '.join(_PICTURES)}.", "Add one."
            )
        require("matplotlib>=3.7", feature="hftrain curves -o", extra="report")
        _write_picture(panels, Path(output))
        lines = [f"Wrote {output}"]
    return Answer(lines + _describe_infinite(panels), {"output": output, "curves": panels})


def _panels(runs: Sequence[RunRecord], metrics: Sequence[str]) -> Panels:
    panels: dict[str, dict[str, Sequence[Point]]] = {}
    for run in runs:
        for metric in metrics:
            if points := run.points(metric):
                label = metric if len(runs) == 1 else f"{run.name}: {metric}"
                panels.setdefault(run.subject(metric), {})[label] = points
    if len(runs) > FEW_RUNS:  # the legend in the order of the curves' ends
        panels = {
            title: dict(sorted(curves.items(), key=lambda curve: -curve[1][-1][1])) for title, curves in panels.items()
        }
    return panels


def _draw(title: str, curves: Mapping[str, Sequence[Point]], width: int, is_colored: bool) -> list[str]:
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.plot_size(width, _ROWS)
    figure.title(title).label("step")
    shown_points: list[Point] = []
    for marker, (label, points) in zip(cycle(_MARKERS), curves.items(), strict=False):
        finite = [point for point in _thinned(points) if math.isfinite(point[1])]
        if finite:
            steps, values = map(list, zip(*finite, strict=True))
            signal = figure.signal(steps, values, marker="hd" if is_colored else marker)
            figure.draw(signal.lines().label(label))
            shown_points += finite
    if shown_points:
        low, high = min(value for _, value in shown_points), max(value for _, value in shown_points)
        # Put the legend in the corner where curves rarely end: a loss falls, an accuracy rises.
        is_rising = max(shown_points)[1] > (low + high) / 2
        corner = {"y": low, "va": "bottom"} if is_rising else {"y": high, "va": "top"}
        first, last = min(shown_points)[0], max(shown_points)[0]
        ticks = [round(first + part * (last - first) / 5) for part in range(6)]
        figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])
        figure.legend(x=max(shown_points)[0], ha="right", relative=True, **corner)
    return str(figure.build().string(not is_colored)).rstrip("\n").splitlines()


def _write_picture(panels: Panels, path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    width, height = _SIZE
    # The same curves produce the same file, with searchable text.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "hftrain", "font.size": 10, "text.parse_math": False}
    ):
        figure = Figure(figsize=(width, height * len(panels)), layout="constrained")
        for axes, (title, curves) in zip(
            figure.subplots(len(panels), squeeze=False)[:, 0], panels.items(), strict=True
        ):
            for number, (label, points) in enumerate(curves.items()):
                steps, values = zip(*_thinned(points), strict=True)
                style = {"marker": "o" if len(points) < 30 else None, "linestyle": _LINES[number // 10 % len(_LINES)]}
                axes.plot(steps, values, label=label, markersize=3, **style)
            axes.set(xlabel="step", ylabel=title)
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
            legend_place = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(curves) > 2 * FEW_RUNS else {}
            axes.legend(frameon=False, **legend_place)
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"Cannot write {str(path)!r}.", f"{error}.", "Give another file with -o.") from error


def _describe_infinite(panels: Panels) -> list[str]:
    """Return a line for each curve with values that are not finite, which are not plotted."""
    counts = {
        label: (sum(not math.isfinite(value) for _, value in points), len(points))
        for curves in panels.values()
        for label, points in curves.items()
    }
    return [f"{label}: {num} of {total} values are NaN or infinite" for label, (num, total) in counts.items() if num]


def _thinned(points: Sequence[Point]) -> list[Point]:
    return [points[position] for position in thinned([value for _, value in points], _MAX_POINTS)]
