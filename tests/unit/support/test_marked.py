"""Files that are not imported, as no test of them can be selected."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.marked import may_hold, named

ONE_OF_SEVERAL = "import pytest\n\n@pytest.mark.slow\n@pytest.mark.cuda\ndef test_one(): ...\n\ndef test_two(): ...\n"
WHOLE_FILE = "import pytest\n\npytestmark = [pytest.mark.slow, pytest.mark.cuda]\n\ndef test_one(): ...\n"


@pytest.mark.parametrize(
    ("expression", "of_several", "of_all"),
    [
        ("", True, True),
        ("slow", True, True),
        ("bench", False, False),
        ("not slow", True, False),
        ("not bench", True, True),
        ("slow and not cuda", True, False),
        ("bench and not cuda", False, False),
        ("bench or slow", True, True),
        ("bench or not slow", True, True),
        ("bench or ray", False, False),
        ("not (slow and cuda)", True, True),
        ("slow(x=1)", True, True),
        ("slow and", True, True),
    ],
)
def test_a_file_is_left_out_only_if_no_test_of_it_can_be_selected(
    tmp_path: Path, expression: str, of_several: bool, of_all: bool
) -> None:
    for name, text, expected in (("several", ONE_OF_SEVERAL, of_several), ("all", WHOLE_FILE, of_all)):
        path = tmp_path / f"test_{name}.py"
        path.write_text(text, encoding="utf-8")
        assert may_hold(path, expression) is expected


def test_a_file_names_the_marks_of_the_helpers_it_imports() -> None:
    assert "trackers" in named(Path(__file__).parents[1] / "loggers/test_wandb.py")
