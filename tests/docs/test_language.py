"""Phrases that readers stumble over do not come back into the documentation or the messages."""

from __future__ import annotations

import re

import pytest
from support.source import ROOT

# What to write instead.
PHRASES = {
    r"\b(was|were) asked for\.[\"']": "Cannot use ...: reason.",
    r"\bhangs? on\b": "depends on",
    r"\bheed(s|ed|ing)?\b": "follow, respect",
    r"\bof ours\b": "our",
    r"\botherwise than\b": "differently from",
    r"\banew\b": "again",
    r"\bits own business\b": "up to it",
    r"\b(is|are) to be told from\b": "differs from",
    r"\bundisturbed\b": "uninterrupted",
    r"\bto the last (bit|digit)\b": "bit-identical",
    r"\bwithout a word\b": "silently",
    r"\bfor ever\b(?! )": "forever",
    r"(?<!here )\b(is|are) no (mapping|tensor|module|dataset|checkpoint|number|metric)s?\b": "is not a ...",
}
# Design notes quote what was, and the changelog is history.
PAGES = [
    path
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path.name != "decisions.md"
]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrase_is_not_used(phrase: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*PAGES, *SOURCES]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(phrase, line)
    ]
    assert not found, f"Write {PHRASES[phrase]!r} instead:\n" + "\n".join(found)
