"""Draw the diagrams of the documentation: ``python docs/diagrams/draw.py``, with Graphviz's ``dot`` on the PATH.

Each ``.dot`` file becomes an ``.svg`` without colours of its own: `_static/diagrams.css` colours its classes, so that
one picture suits a light and a dark page. A page includes it as raw HTML. `docs/images/trainer.svg` is a picture of
its own, with colours, for pages that cannot include HTML.
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
    # Below nine tenths of its size nobody could read it: a wide one scrolls on a phone.
    sizes = f"min-width: {min(int(width[1]) * 9 // 10, 416)}px; max-width: {int(width[1]) * 11 // 10}px"
    style = f'class="diagram" role="img" aria-label="{title}" style="{sizes}"'
    svg = re.sub(r'<svg width="\d+pt" height="\d+pt"', f"<svg {style}", svg, count=1)
    return f'<div class="diagram-frame">\n{svg}</div>\n'


COLOURS = """<style>
svg { background: #fff; font-family: sans-serif; color: #24292f; }
text { fill: currentColor; }
path, polygon { fill: none; stroke: #59636e; }
.edge polygon { fill: #59636e; }
.node path { fill: #f6f8fa; stroke: #d1d9e0; }
.node.user path, .node.main path { stroke: #2757dd; }
.node.main path { stroke-width: 2.5; }
.node.note path { fill: none; stroke: none; }
.edge.note path { stroke-dasharray: 4; }
</style>
"""


def as_picture(drawn: str) -> str:
    """Return a drawing as a picture, with colours and a background."""
    svg = drawn[drawn.index("<svg") : drawn.index("</div>")]
    return re.sub(r"(<svg[^>]*>\n)", rf"\1{COLOURS}", svg, count=1)


if __name__ == "__main__":
    folder = Path(__file__).parent
    for source in sorted(folder.glob("*.dot")):
        source.with_suffix(".svg").write_text(draw(source), encoding="utf-8")
    picture = as_picture(folder.joinpath("trainer.svg").read_text(encoding="utf-8"))
    folder.parent.joinpath("images/trainer.svg").write_text(picture, encoding="utf-8")
