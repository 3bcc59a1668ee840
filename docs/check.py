"""Run the documentation's Python blocks and check its links: ``python docs/check.py [FILE ...]``.

The blocks of one file run in order, in one namespace, in a fork and an empty folder of their own. A block whose
info string says ``no-run`` (```` ```python no-run ````) is not run.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

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


class Server:
    """A process that has imported PyTorch and hftrain, and forks for each file: importing takes longer than most files.

    Each file has, as in a script's process, memory and an empty folder of its own. Use it in a `with` statement.
    """

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # which closes its input, so that it ends

    def check_code(self, path: Path) -> list[str]:
        """Run a file's blocks; return what went wrong."""
        if not any(python_blocks(path)):
            return []
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile() as output:
            self._process.stdin.write(json.dumps([str(path), folder, output.name]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if answer == "0\n":
                return []
            text = Path(output.name).read_text(encoding="utf-8", errors="replace")
        reason = (
            f"Longer than {TIME_LIMIT_S} s" if answer == f"{-signal.SIGALRM}\n" else f"Exit status {answer.strip()}"
        )
        return [f"{path.relative_to(ROOT)}: {reason}\n{textwrap.indent(text, '    ')}"]


def serve() -> Path | None:
    """Fork for each order on standard input; returns the file in its own process, None in the server at the end."""
    import accelerate.utils
    import torch._dynamo  # an optimizer's first step would import it, for every file anew

    import hftrain.trainer.trainer

    _ = accelerate.utils, torch._dynamo, hftrain.trainer.trainer
    for line in sys.stdin:
        path, folder, output = json.loads(line)
        gc.freeze()  # or each process would copy all that is imported as soon as it collects garbage
        pid = os.fork()
        if pid == 0:
            signal.alarm(TIME_LIMIT_S)
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(os.open(output, os.O_WRONLY), 1)
            os.dup2(1, 2)
            return Path(path)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return None


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
    problems, num_servers = [], min(os.cpu_count() or 1, len(paths))
    with ExitStack() as stack, ThreadPoolExecutor(num_servers) as pool:
        idle: SimpleQueue[Server] = SimpleQueue()
        for _ in range(num_servers):
            idle.put(stack.enter_context(Server()))

        def check(path: Path) -> list[str]:
            server = idle.get()
            try:
                return check_links(path) + server.check_code(path)
            finally:
                idle.put(server)

        for path, found in zip(paths, pool.map(check, paths), strict=True):
            print(f"{path.relative_to(ROOT)}: {'FAILED' if found else 'ok'}", flush=True)
            problems += found
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        run_blocks(Path(sys.argv[2]))
    elif sys.argv[1:2] == ["--serve"]:
        page = serve()
        if page is not None:
            run_blocks(page)
    else:
        raise SystemExit(main(sys.argv[1:]))
