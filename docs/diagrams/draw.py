"""Draw the diagrams of the documentation: ``python docs/diagrams/draw.py``, with Graphviz's ``dot`` on the PATH.

Each ``.dot`` file becomes an ``.svg`` without colours of its own: `_static/diagrams.css` colours its classes, so that
one picture suits a light and a dark page. A page includes it as raw HTML.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

STYLE = (
    "-Nshape=box", "-Nstyle=rounded", "-Nfontname=sans-serif", "-Nfontsize=12", "-Nmargin=0.14,0.08",
    "-Gfontname=sans-serif", "-Gfontsize=11", "-Gbgcolor=transparent", "-Gnodesep=0.25", "-Granksep=0.35",
    "-Earrowsize=0.7",
)  # fmt: skip


def draw(source: Path) -> str:
    """Return a diagram as SVG for inclusion in HTML; the first sentence of its source describes it."""
    title = source.read_text(encoding="utf-8").lstrip("/ ").partition(".")[0]
    made = subprocess.run(["dot", "-Tsvg", *STYLE, str(source)], capture_output=True, text=True, check=True).stdout
    svg = made[made.index("<svg") :]
    svg = re.sub(r"<!--.*?-->\n?|<title>.*?</title>\n?", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:fill|stroke|font-family|xmlns:xlink)="[^"]*"', "", svg)
    width = re.search(r'width="(\d+)pt"', svg)
    assert width is not None
    style = f'class="diagram" role="img" aria-label="{title}" style="max-width: {int(width[1]) * 11 // 10}px"'
    svg = re.sub(r'<svg width="\d+pt" height="\d+pt"', f"<svg {style}", svg, count=1)
    return f'<div class="diagram-frame">\n{svg}</div>\n'


if __name__ == "__main__":
    for source in sorted(Path(__file__).parent.glob("*.dot")):
        source.with_suffix(".svg").write_text(draw(source), encoding="utf-8")
