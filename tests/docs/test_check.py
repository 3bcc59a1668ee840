"""The checker of the documentation must itself find what it is for."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.source import ROOT

CHECK = ROOT / "docs/check.py"


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import docs/check.py, with an empty folder as the repository."""
    spec = importlib.util.spec_from_file_location("docs_check", CHECK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "docs_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


@pytest.fixture
def server(check: ModuleType) -> Iterator[Any]:
    with check.Server() as server:
        yield server


def page(folder: Path, text: str) -> Path:
    path = folder / "page.md"
    path.write_text(text, encoding="utf-8")
    return path


def test_python_blocks_keep_their_line_numbers(check: ModuleType, tmp_path: Path) -> None:
    path = page(tmp_path, "# Title\n\n```python\nx = 1\n```\n\n- item\n\n  ```python\n  y = x\n  ```\n")
    assert list(check.python_blocks(path)) == ["\n\n\nx = 1\n", "\n" * 9 + "y = x\n"]


def test_check_code_runs_the_blocks_in_one_namespace_and_an_empty_folder(server: Any, tmp_path: Path) -> None:
    first = "```python\nimport os\nfolder = os.listdir()\n```\n"
    assert server.check_code(page(tmp_path, first + "text\n```python\nassert folder == []\n```\n")) == []


def test_check_code_names_the_line_that_fails(server: Any, tmp_path: Path) -> None:
    (problem,) = server.check_code(page(tmp_path, "text\n\n```python\nok = True\nraise KeyError('gone')\n```\n"))
    assert "line 5" in problem
    assert "KeyError: 'gone'" in problem


@pytest.mark.parametrize("link", ["nowhere.md", "page.md#nowhere", "#nowhere"])
def test_check_links_names_one_that_leads_nowhere(check: ModuleType, tmp_path: Path, link: str) -> None:
    assert check.check_links(page(tmp_path, f"# Title\n\n[x]({link})\n")) == [f"page.md:3: {link} leads nowhere"]
    assert check.check_links(page(tmp_path, f"# Title\n\n[x]: {link}\n")) == [f"page.md:3: {link} leads nowhere"]


def test_check_exits_with_a_failure_where_something_is_wrong() -> None:
    named = ROOT / "LICENSE"
    assert subprocess.run([sys.executable, str(CHECK), str(named)], capture_output=True, check=False).returncode == 0
