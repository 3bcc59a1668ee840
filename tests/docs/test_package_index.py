"""The README as a package index will show it, by the rules of pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_on_a_package_index_installs_from_there_and_links_to_nothing_relative() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]["hooks"]
    text = (ROOT / "README.md").read_text()
    for rule in settings["fancy-pypi-readme"]["substitutions"]:
        changed = re.sub(rule["pattern"], rule["replacement"], text)
        assert changed != text, f"nothing in README.md matches {rule['pattern']}"
        text = changed
    assert "pip install hftrain" in text
    assert "git clone" not in text.split("## ")[0]
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", text) == []
