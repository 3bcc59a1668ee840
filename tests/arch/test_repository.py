"""What no file of the repository may hold."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source import ROOT, modules

BUILT = {".git", ".nox", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", "__pycache__", "build", "dist", "runs"}

# Paths of one machine, and hosts that packages are fetched from: an installation follows the user's own settings.
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:home/(?!someone\b)|(?:root|Users|mnt|srv|work|opt|tmp)/)\w")
REGISTRY_HOST = re.compile(
    r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org)|--(?:extra-)?index-url"
)
CONFLICT = re.compile(r"^(?:<{7}|>{7}) \S")
TODO = re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!\([^)]+\): \S)")

# What reads pickles in other packages, or takes them from other processes. Objects travel between processes as JSON.
UNSAFE_CALLS = (
    "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.jit.load", "torch.hub.load",
    "dist.all_gather_object", "dist.gather_object", "dist.scatter_object_list", "dist.broadcast_object_list",
    "distributed.all_gather_object", "distributed.broadcast_object_list", "checkpoint.FileSystemReader",
    "load_checkpoint_in_model", "read_pickle", "add_safe_globals",
)  # fmt: skip
UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


def text_files() -> Iterator[tuple[Path, str]]:
    """Yield the repository's text files: what git tracks or would track, or all but what is built, without git."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    except (OSError, subprocess.CalledProcessError):
        listed = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if not BUILT & set(p.relative_to(ROOT).parts)]
    for name in filter(None, listed):
        path = ROOT / name
        if path.is_file():
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def lines_with(pattern: re.Pattern[str], under: Path = ROOT) -> list[str]:
    """Name the lines of the repository that a pattern is found in."""
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for path, text in text_files()
        if under in path.parents
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def unsafe_loads(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    """Yield what could run code that stands in a file: pickles, `torch.load` unless it is safe, `eval`, `exec`."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            # Writing bytes runs nothing.
            writes = isinstance(node, ast.ImportFrom) and [alias.name for alias in node.names] == ["dumps"]
            for name in set() if writes else {name.split(".")[0] for name in names} & UNSAFE_MODULES:
                yield node, f"import of {name}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called == "torch.load" and keywords.get("weights_only") != "True":
                yield node, "torch.load without weights_only=True"
            if called in ("eval", "exec") or called.endswith(UNSAFE_CALLS):
                yield node, called
            if keywords.get("allow_pickle", "False") != "False":
                yield node, "allow_pickle"
        if isinstance(node, ast.ImportFrom) and node.module == "torch" and any(a.name == "load" for a in node.names):
            yield node, "torch.load under another name"


def test_repository_has_files_to_check() -> None:
    assert {"README.md", "pyproject.toml"} <= {path.name for path, _ in text_files()}


def test_repository_names_no_machine() -> None:
    assert lines_with(MACHINE_PATH) == []


def test_repository_names_no_registry() -> None:
    assert lines_with(REGISTRY_HOST) == []


def test_repository_holds_no_marks_of_a_merge() -> None:
    assert lines_with(CONFLICT) == []


def test_source_says_why_something_is_left_to_do() -> None:
    assert lines_with(TODO, ROOT / "src") == [], "write TODO(who or which issue): what and why"


def test_source_never_runs_code_from_a_file() -> None:
    assert [f"{module.at(node)}: {what}" for module in modules() for node, what in unsafe_loads(module.tree)] == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "from torch import load",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "dist.all_gather_object(found, mine)",
        "torch.jit.load(path)",
    ],
)
def test_unsafe_loads_sees_one(text: str) -> None:
    assert len(list(unsafe_loads(ast.parse(text)))) == 1


def test_unsafe_loads_lets_safe_ones_pass() -> None:
    assert list(unsafe_loads(ast.parse("torch.load(path, weights_only=True)\nmodel.eval()\nimport json"))) == []


@pytest.mark.parametrize(
    ("pattern", "text", "is_found"),
    [
        (MACHINE_PATH, "see " + "/home" + "/ann/data", True),
        (MACHINE_PATH, "see docs/" + "work/flow.md", False),
        (MACHINE_PATH, "HOME=/home" + "/someone", False),
        (REGISTRY_HOST, "from https://" + "pypi." + "org/simple", True),
        (REGISTRY_HOST, "from https://pytorch.org", False),
        (CONFLICT, "<" * 7 + " HEAD", True),
        (CONFLICT, "=" * 7, False),
        (TODO, "# TO" + "DO: mend", True),
        (TODO, "# TO" + "DO(issue 12): mend once torch 3 is out", False),
    ],
)
def test_patterns_find_what_they_are_for(pattern: re.Pattern[str], text: str, is_found: bool) -> None:
    assert bool(pattern.search(text)) is is_found
