"""Print a run's summary; on a terminal, the progress callback prints it by default."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from hftrain.callbacks.base import TrainerCallback
from hftrain.callbacks.lines import columns_of, fold

Rows = dict[str, list[str]]


class SummaryCallback(TrainerCallback):
    """Print a summary at the end of `train()`: steps, time, metrics, checkpoints, and what was unusual.

    Add it for the summary in a log file or pipe, with `disable_tqdm=True`, or in a notebook. A subclass may
    override `show_summary` to send the text elsewhere. Only process zero is called.

    Args:
        file: The output; standard output by default.
    """

    def __init__(self, *, file: TextIO | None = None) -> None:
        self._file = file

    def show_summary(self, title: str, rows: Rows) -> None:
        """Show the summary of a run.

        Args:
            title: A line that says what the run did.
            rows: The cells of each row, by its label.
        """
        file = self._file or sys.stdout
        print(summary_text(title, rows, width=columns_of(file)), file=file, flush=True)


def summary_text(title: str, rows: Rows, *, width: Any = None) -> str:
    """Return a summary as text.

    Args:
        width: Columns of the terminal; None does not fold lines.

    Example:
        >>> print(summary_text("Trained 9 steps", {"loss": ["0.5", "mean 0.7"], "evaluation": ["eval_loss 0.4"]}))
        Trained 9 steps
          loss        0.5  mean 0.7
          evaluation  eval_loss 0.4
    """
    indent = 4 + max(map(len, rows), default=0)
    lines = fold([title], width or sys.maxsize)
    for label, cells in rows.items():
        folded = fold(cells, max((width or sys.maxsize) - indent - 1, 20), indent=0)
        lines.append(f"{f'  {label}':<{indent}}" + f"\n{'':{indent}}".join(line.rstrip() for line in folded))
    return "\n".join(lines)
