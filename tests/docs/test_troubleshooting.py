"""The messages that the troubleshooting page quotes are those of the code."""

from __future__ import annotations

import re

import pytest
from support.source import PACKAGE, ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)
# Texts that go on in the next line of the source are joined.
CODE = re.sub(r'"\s*\n\s*r?f?"', "", "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")))


@pytest.mark.parametrize("words", QUOTED)
def test_quoted_message_is_in_the_code(words: str) -> None:
    assert words in CODE
