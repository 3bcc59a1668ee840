"""Run the documentation's Python blocks and check its links: ``python docs/check.py [FILE ...]``.

The blocks of one file run in order, in one namespace, in a process and an empty folder of their own. A block whose
info string says ``no-run`` (```` ```python no-run ````) is not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIME_LIMIT_S = 300

FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,}|~{3,})(?P<info>.*)$")
LINK = re.compile(r"\[[^\]]*\]\((?P<inline>[^)\s]+)[^)]*\)|^\[[^\]]+\]:\s+(?P<reference>\S+)")
EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


@dataclass(frozen=True)
class Line:
    """One line of a Markdown file: its number from 1, its text, and the info string of the block it is in, if any."""

    number: int
    text: str
    block: str | None


def read_lines(path: Path) -> Iterator[Line]:
    """Yield a file's lines; the fences themselves are left out."""
    fence, info = "", None
    for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        found = FENCE.match(text)
        if found and not fence:
            fence, info = found["fence"], found["info"].strip()
        elif found and found["fence"].startswith(fence) and not found["info"].strip():
            fence, info = "", None
        else:
            yield Line(number, text, info)
    if fence:
        raise SystemExit(f"{path}: a code block is never closed.")


def python_blocks(path: Path) -> Iterator[str]:
    """Yield the blocks that are to run, each moved down to its own line numbers so that tracebacks name them."""
    block: list[Line] = []
    for line in [*read_lines(path), Line(0, "", None)]:
        if block and line.number != block[-1].number + 1:
            yield "\n" * (block[0].number - 1) + textwrap.dedent("\n".join(each.text for each in block)) + "\n"
            block = []
        words = (line.block or "").split()
        if words[:1] == ["python"] and "no-run" not in words:
            block.append(line)


def run_blocks(path: Path) -> None:
    """Run a file's blocks in this process; the file stands in for a script's `__main__`."""
    namespace = sys.modules["__main__"].__dict__
    for block in python_blocks(path):
        exec(compile(block, str(path), "exec"), namespace)


def check_code(path: Path) -> list[str]:
    """Run a file's blocks in a fresh process and an empty folder; return what went wrong."""
    if not any(python_blocks(path)):
        return []
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(
                [sys.executable, __file__, "--run", str(path)],
                cwd=folder,
                check=True,
                timeout=TIME_LIMIT_S,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout
            return [f"{path.relative_to(ROOT)}: {error}\n{textwrap.indent(output or '', '    ')}"]
    return []


def anchors(path: Path) -> set[str]:
    """Return the anchors of a file's headings, formed as GitHub does."""
    found: list[str] = []
    for line in read_lines(path):
        if line.block is None and re.match(r"#{1,6} ", line.text):
            title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line.text.lstrip("#").strip())
            found.append(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-"))
    repeated = {f"{name}-{number}" for name in set(found) for number in range(1, found.count(name))}
    return set(found) | repeated


def check_links(path: Path) -> list[str]:
    """Return a file's links to files or headings that do not exist; links to other sites are not followed."""
    missing = []
    for line in read_lines(path):
        if line.block is not None:
            continue
        for found in LINK.finditer(re.sub(r"`[^`]*`", "", line.text)):
            link = found["inline"] or found["reference"]
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if EXTERNAL.match(link):
                continue
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                missing.append(f"{path.relative_to(ROOT)}:{line.number}: {link} leads nowhere")
    return missing


def main(names: list[str]) -> int:
    """Check the named files, or all of them; return the exit status."""
    paths = [Path(name).resolve() for name in names] or [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
    problems = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for path, found in zip(paths, pool.map(lambda path: check_links(path) + check_code(path), paths), strict=True):
            print(f"{path.relative_to(ROOT)}: {'FAILED' if found else 'ok'}", flush=True)
            problems += found
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_blocks(Path(sys.argv[2]))
    else:
        raise SystemExit(main(sys.argv[1:]))
