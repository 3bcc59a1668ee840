"""Ranks without a launcher: forked from one process that has imported everything, so that many runs take seconds.

``python forked.py FILE FUNCTION``: for each of the keyword arguments in ``cases.json``, fork ranks that call the
function and end as a script does, uncaught errors and exit handlers included. Rank 0 serves the store itself, and
nobody ends the other ranks when one is gone: what `torchrun` would do for them, they have to do themselves.
"""

from __future__ import annotations

import gc
import importlib.util
import inspect
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # tests/, as pytest does

from support.distributed import run_command

_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_")


@dataclass(frozen=True)
class Ended:
    """How one rank ended.

    Args:
        code: The exit status, negative for a signal.
        end_s: Seconds from the start of its case.
        output: What it wrote to standard output and error.
    """

    code: int
    end_s: float
    output: str


def run_cases(
    target: Callable[..., Any],
    folder: Path,
    cases: Sequence[Mapping[str, Any]],
    *,
    num_ranks: int = 2,
    timeout_s: float,
) -> list[list[Ended]]:
    """Call `target` of a test file with each case's keyword arguments, on forked ranks; returns the ranks of each case.

    Args:
        target: A function at the top level of its file.
        folder: An empty folder for what is written; each case has one of its own there as its working directory.
        cases: Keyword arguments, as JSON.
        num_ranks: How many ranks each case has.
        timeout_s: Seconds for all cases together.
    """
    (folder / "cases.json").write_text(json.dumps({"num_ranks": num_ranks, "cases": list(cases)}), encoding="utf-8")
    where = inspect.getsourcefile(target) or ""
    code, output = run_command([sys.executable, __file__, where, target.__name__], folder, {}, timeout_s)
    if code != 0:
        raise AssertionError(f"Exit status {code}:\n{output}")
    ended = json.loads((folder / "ended.json").read_text(encoding="utf-8"))
    return [
        [
            Ended(
                rank["code"], rank["end_s"], (folder / str(index) / f"rank{number}.txt").read_text("utf-8", "replace")
            )
            for number, rank in enumerate(ranks)
        ]
        for index, ranks in enumerate(ended)
    ]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _become_rank(rank: int, num_ranks: int, port: int, folder: Path) -> None:
    for name in [name for name in os.environ if name.startswith(_LAUNCHERS)]:
        del os.environ[name]
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    os.environ.update(
        {name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.chdir(folder)
    output = os.open(f"rank{rank}.txt", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)


def _run_all(num_ranks: int, cases: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Run the cases one after the other; returns the keyword arguments in a rank, None in the parent at the end."""
    ended = []
    for index, case in enumerate(cases):
        folder, port, start_s = Path(str(index)).absolute(), free_port(), time.monotonic()
        folder.mkdir()
        ranks: dict[int, int] = {}
        gc.freeze()  # or each rank would copy and search, at its end, all that is imported
        for rank in range(num_ranks):
            pid = os.fork()
            if pid == 0:
                _become_rank(rank, num_ranks, port, folder)
                return case
            ranks[pid] = rank
        found: dict[int, dict[str, Any]] = {}
        while len(found) < num_ranks:
            pid, status = os.wait()
            found[ranks[pid]] = {"code": os.waitstatus_to_exitcode(status), "end_s": time.monotonic() - start_s}
        ended.append([found[rank] for rank in range(num_ranks)])
    Path("ended.json").write_text(json.dumps(ended), encoding="utf-8")
    return None


def main(path: str, name: str) -> None:
    import accelerate.utils
    import torch._dynamo  # an optimizer's first step would import it, in every rank anew

    import hftrain.extras.trackers.choice
    import hftrain.trainer.trainer

    _ = accelerate.utils, torch._dynamo, hftrain.trainer.trainer
    hftrain.extras.trackers.choice.available_loggers = list
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    given = json.loads(Path("cases.json").read_text(encoding="utf-8"))
    case = _run_all(given["num_ranks"], given["cases"])
    if case is not None:
        getattr(module, name)(**case)


if __name__ == "__main__":
    main(*sys.argv[1:])
