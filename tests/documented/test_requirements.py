"""Every requirement of `requirements.md` is held by tests that exist.

Each file in `requirements/` has lines ``R123 path::test [path::test ...]``; several files may add tests to one
requirement. Tests are looked up in the source, not imported. A line that begins with ``#`` is a note.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.source import ROOT

HERE = Path(__file__).parent
SECTION = re.compile(r"## ([A-Z]+)\. ")
REQUIREMENT = re.compile(r"- (R\d{3}) \S")

# Sections with requirements that no test holds yet: what is missing there.
OPEN_SECTIONS: dict[str, str] = {}


def read_sections(text: str) -> dict[str, list[str]]:
    """Map each section to its requirements."""
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        if found := SECTION.match(line):
            sections[found[1]] = []
        elif found := REQUIREMENT.match(line):
            sections[list(sections)[-1]].append(found[1])
    return sections


def read_claims(folder: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (place, requirement, tests) for each line of the files."""
    for path in sorted(folder.glob("*.txt")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            words = line.split()
            if words and not line.startswith("#"):
                yield f"{path.name}:{number}", words[0], words[1:]


@functools.cache
def names_in(path: Path) -> frozenset[str]:
    """Return the names of a file's tests: functions, and methods as ``Class::method``."""
    if not path.is_file():
        return frozenset()
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return frozenset(name for name in names if name.split("::")[-1].startswith("test_"))


def is_test(name: str, root: Path = ROOT) -> bool:
    """Tell whether ``path::test`` names a test."""
    path, _, test = name.partition("::")
    return test in names_in(root / path)


SECTIONS = read_sections((HERE / "requirements.md").read_text(encoding="utf-8"))
CLAIMS = list(read_claims(HERE / "requirements"))


def test_requirements_are_numbered_without_gaps() -> None:
    numbers = [int(each[1:]) for requirements in SECTIONS.values() for each in requirements]
    assert numbers == list(range(1, len(numbers) + 1))


def test_claims_name_requirements_that_exist() -> None:
    known = {each for requirements in SECTIONS.values() for each in requirements}
    assert [f"{place}: {requirement}" for place, requirement, _ in CLAIMS if requirement not in known] == []


def test_claims_name_tests_that_exist() -> None:
    missing = [f"{place}: {test}" for place, _, tests in CLAIMS for test in tests if not is_test(test)]
    assert missing + [f"{place}: no test" for place, _, tests in CLAIMS if not tests] == []


@pytest.mark.parametrize("section", [section for section in SECTIONS if section not in OPEN_SECTIONS])
def test_section_is_held_by_tests(section: str) -> None:
    held = {requirement for _, requirement, _ in CLAIMS}
    assert [each for each in SECTIONS[section] if each not in held] == []


def test_open_sections_exist_and_are_open() -> None:
    held = {requirement for _, requirement, _ in CLAIMS}
    assert OPEN_SECTIONS.keys() <= SECTIONS.keys()
    assert [section for section in OPEN_SECTIONS if set(SECTIONS[section]) <= held] == []


def test_lookup_sees_what_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "def test_a(): ...\ndef helper(): ...\nclass TestB:\n    def test_c(self): ...\n", encoding="utf-8"
    )
    names = ["test_x.py::test_a", "test_x.py::TestB::test_c", "test_x.py::helper", "test_x.py::test_z", "no.py::test_a"]
    assert [is_test(name, tmp_path) for name in names] == [True, True, False, False, False]


def test_files_are_read_line_by_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("# a note\n\nR001 t.py::test_a t.py::test_b\n", encoding="utf-8")
    assert list(read_claims(tmp_path)) == [("a.txt:3", "R001", ["t.py::test_a", "t.py::test_b"])]
    assert read_sections("## A. One\n- R001 x\n### A1\n- R002 y\n## B. Two\n") == {"A": ["R001", "R002"], "B": []}
