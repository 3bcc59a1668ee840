"""Each public name has one page in the API reference."""

from __future__ import annotations

import re

from support.source import ROOT

import hftrain

PACKAGES = ("loggers", "loops", "strategies")
# These are on the pages of the packages themselves.
REGISTRY = {"register", "names", "summary", "resolve", "create", "loggers"}


def test_each_public_name_has_one_page() -> None:
    listed = [
        name
        for path in sorted((ROOT / "docs/api").glob("*.md"))
        for block in re.findall(
            r"^\.\. autosummary::\n(?:   :.*\n)+\n((?:   .+\n)+)", path.read_text("utf-8"), re.MULTILINE
        )
        for name in block.split()
    ]
    of_packages = [
        f"{package}.{name}"
        for package in PACKAGES
        for name in getattr(hftrain, package).__all__
        if name not in {*REGISTRY, *hftrain.__all__}
    ]
    # The notebook's table is transformers', and is a public name where IPython is installed, too.
    public = [name for name in hftrain.__all__ if name != "NotebookProgressCallback"]
    assert sorted(listed) == sorted([*public, *of_packages]), "list each name once on a page of docs/api"
