"""A process that has imported everything and forks for each order: ``fork_server.py FILE FUNCTION``.

Each line of standard input is an order; `support.forking.ForkServer` writes them and reads the answers. What the first
child had to import besides is then imported here, so that later ones find it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import Any

from support.worker import find

import hftrain.extras.trackers.choice

hftrain.extras.trackers.choice.available_loggers = list  # no tracker that happens to be installed


def run(function: Any, order: dict[str, Any], number: int) -> None:
    """Be a child: call the function and write its answer, or the traceback, beside the order's other files."""
    stem = f"{order['stem']}.{number}"
    log = os.open(f"{stem}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(order["envs"][number])
    if order["memory_bytes"]:
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + order["memory_bytes"],) * 2)
    before, status = set(sys.modules), 1
    try:
        Path(f"{stem}.json").write_text(json.dumps(function(**order["kwargs"])), encoding="utf-8")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):  # no space, in tests of that
            Path(f"{stem}.imports").write_text(json.dumps(sorted(set(sys.modules) - before)), encoding="utf-8")
        os._exit(status)


def main(path: str, name: str) -> None:
    """Serve orders until standard input ends."""
    function, is_warm = find(path, name), False
    for line in sys.stdin:
        order = json.loads(line)
        pids = []
        gc.freeze()  # or each child would copy and search all that is imported wherever it collects garbage
        for number in range(len(order["envs"])):
            pid = os.fork()
            if pid == 0:
                run(function, order, number)
            pids.append(pid)
        os.write(1, (json.dumps(pids) + "\n").encode())
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        imports = Path(f"{order['stem']}.0.imports")
        if not is_warm and imports.exists():
            is_warm = True
            for module in json.loads(imports.read_text(encoding="utf-8")):
                with contextlib.suppress(Exception):
                    importlib.import_module(module)
        os.write(1, (json.dumps(statuses) + "\n").encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
