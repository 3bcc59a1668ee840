"""The first page shows the figures that docs/performance.md has, as `nox -s figures` and `waits.py` write them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("hftrain-task", "hftrain-module", "accelerate-fused", "transformers", "lightning-fused")


ROW = r"^\| (.+?) \| (.+?) \| \S+ \| (\S+) .*\|$"


def test_first_page_shows_what_was_measured() -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    text = (ROOT / "docs/performance.md").read_text("utf-8").partition("printed by: python benchmarks/overhead.py")[2]
    measured: dict[str, dict[str, float]] = {}
    for size, contender, ratio in re.findall(ROW, text.partition("<!-- end")[0], re.MULTILINE):
        if ratio[0].isdigit():
            measured.setdefault(size, {})[contender] = float(ratio)
    rows = page.partition("<!-- written by: nox -s figures -->")[2].partition("<!-- end")[0].strip().splitlines()[2:]
    assert len(rows) == len(measured)
    for row, ratios in zip(rows, measured.values(), strict=True):
        shown = [float(number) for number in re.findall(r"(\S+) \|", row)[-5:]]
        assert shown == pytest.approx([ratios[name] for name in SHOWN], abs=0.0051)
    claim = re.search(r"A step costs (\d+) % over a plain loop,\*\* where .+ cost (\d+) %", page)
    assert claim is not None
    ours, others = measured["1ms"]["hftrain-task"], min(measured["1ms"][name] for name in SHOWN[3:])
    assert [int(number) for number in claim.groups()] == [round(100 * (ratio - 1)) for ratio in (ours, others)]


def test_first_page_shows_the_waits_that_were_counted() -> None:
    page, whole = ((ROOT / name).read_text("utf-8") for name in ("README.md", "docs/performance.md"))
    shown = re.findall(r"^\| ((?:step|batch)[^|]*) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    row = r"^\| ([^|]+) \| \S+ \| (\S+) \| \2 \| (\S+) \| (\S+) \| (\S+) \|$"  # one for the task, too
    assert len(shown) == 4
    assert {*shown} <= {*re.findall(row, whole, re.MULTILINE)}
