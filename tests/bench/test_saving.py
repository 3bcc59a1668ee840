"""The promise of saving in the background, measured by a short form of `benchmarks/saving.py`; writes some GB."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.source import ROOT

from hftrain.storage.files import read_json

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1800)]


def test_async_save_stalls_far_less_than_a_save_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script, path = "benchmarks/saving.py", tmp_path / "results.json"
    options = ("--contenders", "transformers", "hftrain", "--folder", str(tmp_path), "--json", str(path))
    subprocess.run([sys.executable, script, *options], cwd=ROOT, check=True)
    results, benchmark = read_json(path), runpy.run_path(str(ROOT / script))
    for stall_s in (benchmark["first_s"], benchmark["later_s"]):
        assert stall_s(results["transformers"]) >= benchmark["TARGET"] * stall_s(results["hftrain"]), results
