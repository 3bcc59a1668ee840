"""Libraries that need transformers 4.57 train with hftrain as they do with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.comparing import compare, run_client

pytestmark = pytest.mark.clients


@pytest.mark.parametrize("client", ["adapters_text", "span_marker_text"])
def test_client_of_the_previous_generation_trains_as_with_transformers(client: str, tmp_path: Path) -> None:
    outcomes = [run_client(client, library, tmp_path) for library in ("transformers", "hftrain")]
    assert compare(*outcomes) == []


def test_summed_loss_trains_as_with_transformers(tmp_path: Path) -> None:
    """Rule: `eval_loss` of a loss that is a sum is per sample; transformers' is that of a batch, here of 4 samples."""
    theirs, ours = (run_client("gliner_text", library, tmp_path) for library in ("transformers", "hftrain"))
    for entry in (*ours.history, ours.more):
        if "eval_loss" in entry:
            entry["eval_loss"] *= 4
    assert compare(theirs, ours) == []
