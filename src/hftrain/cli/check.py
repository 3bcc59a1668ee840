"""`hftrain check`: what this machine does right, and what to do about what it does not."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from hftrain.checkpoint.manifest import PACKAGES
from hftrain.cli.answer import Answer
from hftrain.core.extras import installed_versions
from hftrain.core.launcher import read_launch
from hftrain.extras.check.proofs import Outcome, prove_all


def show_check(output_dir: str | None = None, output: str | None = None) -> Answer:
    """Return the table that `hftrain check` prints; its status is 1 if a proof failed. Collective under a launcher.

    Args:
        output_dir: A folder to prove locks and renames in, such as that of a run.
        output: A file to write the answer to as JSON, to be attached to a report.
    """
    outcomes: list[Outcome] = []
    is_main = read_launch().rank == 0
    for outcome in prove_all(None if output_dir is None else Path(output_dir)):
        outcomes.append(outcome)
        if is_main:
            print(f"{len(outcomes)}: {outcome.name}", file=sys.stderr, flush=True)
    failed = [each for each in outcomes if each.status == "FAIL"]
    width = max(len(each.name) for each in outcomes)
    lines = [f"{each.status:8}  {each.name:{width}}  {each.found}" for each in outcomes]
    lines += [f"\n{each.name}: {each.remedy}" for each in failed]
    data = {"versions": installed_versions(*PACKAGES), "proofs": [asdict(each) for each in outcomes]}
    answer = Answer(lines if is_main else [], data, status=int(bool(failed)))
    if output is not None and is_main:
        Path(output).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    return answer
