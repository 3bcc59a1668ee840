"""The commands of noxfile.py, next to what CONTRIBUTING.md, README.md, pyproject.toml and .ci/run say of them."""

from __future__ import annotations

import ast
import os
import re

import pytest
from support.source import ROOT

NOXFILE = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))


def sessions() -> set[str]:
    """Return the names of the sessions, read without importing nox."""
    found = set()
    for node in NOXFILE.body:
        for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            if ast.unparse(decorator).startswith("nox.session"):
                keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
                found.add(next((ast.literal_eval(k.value) for k in keywords if k.arg == "name"), node.name))
    return found


def constant(name: str) -> tuple[str, ...]:
    assigned = (node for node in NOXFILE.body if isinstance(node, ast.Assign))
    return next(ast.literal_eval(node.value) for node in assigned if ast.unparse(node.targets[0]) == name)


def test_contributing_lists_every_session() -> None:
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("| `nox -s")]
    listed = {word for line in table for cell in re.findall(r"`([^`]+)`", line.split("|")[1]) for word in cell.split()}
    assert listed - {"nox", "-s"} == sessions()


def test_pages_and_session_name_the_oldest_versions() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    python, torch = (re.findall(rf'{name}>=([\d.]+)"', text)[0] for name in ('requires-python = "', '"torch'))
    for page in ("README.md", "docs/tour.md"):
        assert f"(Python {python} or newer, PyTorch {torch} or newer)" in (ROOT / page).read_text(encoding="utf-8")
    assert f'@nox.session(name="tests-oldest", python="{python}")' in (ROOT / "noxfile.py").read_text(encoding="utf-8")


def test_every_mark_of_pyproject_has_a_session_of_its_own(request: pytest.FixtureRequest) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    ours = re.findall(r'^    "(\w+): ', text[text.index("\nmarkers = [") :], re.MULTILINE)
    assert sorted(constant("MARKS")) == sorted(ours)
    assert set(ours) <= {line.split(":")[0] for line in request.config.getini("markers")}


def test_ci_runs_sessions_that_exist() -> None:
    script = ROOT / ".ci/run"
    text = script.read_text(encoding="utf-8")
    calls = re.findall(r"(?:run_nox -s|run_shared|own=\() *([a-z][a-z -]*)", text)
    named = {name for call in calls for name in call.split()}
    assert {"tests", "lint", "types", "docs", "tests-distributed", "quickstart"} <= named <= sessions()
    assert os.access(script, os.X_OK)
