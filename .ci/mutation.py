"""Change single operators, numbers and conditions of three rooms, and count the changes that a test notices.

    nox -s mutation                        # 60 changes of each room, drawn with a fixed seed; an hour or more
    nox -s mutation -- --changes 0 loss    # all changes of one room

The changes are made by cosmic-ray, in a clone of the commit. What no test notices is printed as a diff: some of it
changes nothing that anybody could see (the words of a message, a faster path), the rest is a test that is missing.
"""

from __future__ import annotations

import argparse
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What is changed, and the tests that are to notice.
ROOMS = {
    "loss": (
        ("trainer/loss_kinds.py", "trainer/loss_normalization.py", "trainer/evaluation_mean.py"),
        ("tests/loops/test_loss_kinds.py", "tests/parity/test_global_mean.py", "tests/unit/trainer/test_loss_means.py",
         "tests/unit/trainer/test_count_items_check.py", "tests/unit/trainer/test_evaluation_mean.py",
         "tests/unit/trainer/test_micro_batches.py"),
    ),
    "checkpoint": (
        ("checkpoint/geometry.py", "checkpoint/layout.py", "checkpoint/manifest.py", "checkpoint/rotation.py"),
        ("tests/unit/checkpoint/test_geometry.py", "tests/unit/checkpoint/test_manifest.py",
         "tests/resume/test_best_checkpoint.py", "tests/resume/test_clock.py",
         "tests/guarantees/test_g4_as_many_steps_as_planned.py"),
    ),
    "feed": (
        ("data/feed.py",),
        ("tests/unit/data/test_feed.py", "tests/unit/data/test_positions.py", "tests/unit/data/test_states.py",
         "tests/unit/data/test_streams.py", "tests/resume/test_exact.py", "tests/resume/test_stateful_loaders.py",
         "tests/guarantees/test_g2_resume.py"),
    ),
}  # fmt: skip
# Changes of annotations, which run nothing.
NOT_RUN = ("core/ReplaceBinaryOperator_BitOr%", "core/RemoveDecorator%")
CONFIG = """[cosmic-ray]
module-path = [{modules}]
timeout = {timeout}
test-command = "{command}"
[cosmic-ray.distributor]
name = "local"
"""


def score(room: str, clone: Path, changes: int, timeout: int) -> tuple[int, int, list[str]]:
    """Return how many changes were noticed, of how many, and the diffs of the others."""
    modules, tests = ROOMS[room]
    marks = "not slow and not guarantees and not distributed and not interop"
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider -m '{marks}' {' '.join(tests)}"
    named = ", ".join(f'"src/hftrain/{name}"' for name in modules)
    config, session = clone.parent / f"{room}.toml", clone.parent / f"{room}.sqlite"
    config.write_text(CONFIG.format(modules=named, timeout=timeout, command=command), encoding="utf-8")
    subprocess.run(["cosmic-ray", "init", str(config), str(session)], cwd=clone, check=True)
    with closing(sqlite3.connect(session)) as work, work:
        for pattern in NOT_RUN:
            work.execute("DELETE FROM mutation_specs WHERE operator_name LIKE ?", (pattern,))
        places = "module_path, start_pos_row, start_pos_col, operator_name, occurrence"
        found = [row[0] for row in work.execute(f"SELECT job_id FROM mutation_specs ORDER BY {places}")]
        drawn = set(random.Random(0).sample(found, min(changes or len(found), len(found))))
        for table in ("mutation_specs", "work_items"):
            ids = [row[0] for row in work.execute(f"SELECT job_id FROM {table}")]
            work.executemany(f"DELETE FROM {table} WHERE job_id = ?", [(each,) for each in ids if each not in drawn])
    env = {**os.environ, "PYTHONPATH": str(clone / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(["cosmic-ray", "exec", str(config), str(session)], cwd=clone, env=env, check=True)
    with closing(sqlite3.connect(session)) as work:
        results = work.execute("SELECT test_outcome, diff FROM work_results").fetchall()
    missed = [diff for outcome, diff in results if outcome == "SURVIVED"]
    return len(results) - len(missed), len(results), missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rooms", nargs="*", help=f"of {', '.join(ROOMS)}; all if left out")
    parser.add_argument("--changes", type=int, default=60, help="of each room; 0: all (60)")
    parser.add_argument("--timeout", type=int, default=300, help="seconds of one run of a room's tests (300)")
    options = parser.parse_args()
    if unknown := set(options.rooms) - set(ROOMS):
        parser.error(f"There is no room {', '.join(sorted(unknown))}; choose of {', '.join(ROOMS)}.")
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder, "hftrain")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        for room in options.rooms or ROOMS:
            noticed, number, missed = score(room, clone, options.changes, options.timeout)
            print("\n".join(missed), flush=True)
            lines.append(f"{room:12} {noticed} of {number} changes noticed ({noticed / max(number, 1):.0%})")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
