"""Index the built pages for the site's search: `conf.py` calls it after each build.

Pagefind weighs a word by its heading, and shows the sections whose headings have an `id`. Sphinx sets the `id` around
the heading, and makes no headings of the members of a class; so pagefind gets a copy of the pages that has them.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

# How much a word counts, by the beginning of the page's name: lists of names find a name, guides explain it.
WEIGHTS = {"api": 0.3, "arguments": 0.3, "clients": 0.3, "command_line": 0.3, "guarantees": 0.3}
WEIGHTS |= {"design/": 0.3, "releasing": 0.3, "strategy_tables": 0.3, "recipes/index": 0.5, "numbers": 0.5}
WEIGHTS |= {"comparison": 0.5, "examples": 0.5, "from_": 0.5, "index": 0.5}
# Sections with an `id`; signatures; and the terms of a list, which are the names of arguments.
SECTION = re.compile(r'<section id="([^"]+)">\s*((?:<span id="[^"]*"></span>\s*)*)<(h[2-6])>')
SIGNATURE = re.compile(r'<dt class="sig[^"]*" id="([^"]+)">.*?</dt>', re.DOTALL)
TERM = re.compile(r"<dt>(?=<code)")


def as_heading(member: str, page: str) -> str:
    """Return a heading for a member; the object of the page itself has one."""
    if page.endswith(f"/{member}"):
        return ""
    return f'<h2 id="{member}" data-pagefind-weight="3">{member.removeprefix("hftrain.")}</h2>'


def as_indexed(html: str, name: str) -> str:
    """Return a page as pagefind shall see it."""
    text = html[html.index("<article") : html.index("</article>")]
    text = SECTION.sub(r'<section><\3 id="\1">', text)
    text = SIGNATURE.sub(lambda found: as_heading(found[1], name), text)
    text = text.replace("<pre>", '<pre data-pagefind-weight="0.3">')
    text = TERM.sub('<dt data-pagefind-weight="9">', text)
    weight = next((weight for start, weight in WEIGHTS.items() if name.startswith(start)), 1)
    if weight == 1:
        text = text.replace("<h1", '<h1 data-pagefind-meta="guide"', 1)
    marks = f' data-pagefind-weight="{weight}"' if weight != 1 else ""
    return f'<!doctype html><html lang="en"><body data-pagefind-body{marks}>{text}</body></html>'


def index(built: Path, names: list[str]) -> None:
    """Write the index of the named pages into the folder `pagefind` of the built site."""
    with TemporaryDirectory() as folder:
        for name in names:
            page = Path(folder, f"{name}.html")
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(as_indexed((built / f"{name}.html").read_text(encoding="utf-8"), name), encoding="utf-8")
        options = ("--site", folder, "--output-path", str(built / "pagefind"), "--exclude-selectors", ".headerlink")
        subprocess.run([sys.executable, "-m", "pagefind", *options, "--silent", "--keep-index-url"], check=True)
