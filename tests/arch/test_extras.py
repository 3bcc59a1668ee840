"""Extras can be taken out: without one, its line and its names, the core's own tests pass."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.source import PACKAGE, ROOT, modules

from hftrain.core.errors import MissingDependencyError
from hftrain.core.extras import extra

CORE = ("tests/loops/test_first_steps.py", "tests/resume/test_numbers.py", "tests/unit/run/test_disk_space.py")


def test_core_works_without_extras(tmp_path: Path) -> None:
    source = tmp_path / "src" / "hftrain"
    shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("flight", "search", "averaging.py"):
        gone = source / "extras" / name
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
        for path in (source / "core" / "extras.py", source / "__init__.pyi"):
            kept = re.sub(rf".*(hftrain\.extras\.|: \"){gone.stem}\b.*\n", "", path.read_text("utf-8"))
            path.write_text(kept, "utf-8")
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", *CORE]
    code = f"""
import sys; sys.path.insert(0, {str(source.parent)!r})
import hftrain, pytest
assert hftrain.__file__ == {str(source / "__init__.py")!r}
sys.exit(pytest.main({options!r}))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_every_name_leads_to_a_module() -> None:
    names = {name for each in modules() for name in re.findall(r'\bextra\("(\w+)"\)', each.path.read_text("utf-8"))}
    assert len(names) > 40
    assert all(extra(name).__name__.startswith("hftrain.extras.") for name in names)


def test_extra_that_was_taken_out_is_named() -> None:
    with pytest.raises(MissingDependencyError, match="'other'"):
        extra("other")
