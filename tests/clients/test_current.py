"""Libraries of transformers' newest generation train with hftrain as they do with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.comparing import compare, run_client

pytestmark = pytest.mark.clients

# Everything equal to 1e-4: each entry of the log history, the checkpoints' files and weights, and the final weights.
EQUAL = ("sft", "dpo", "reward", "kto", "orpo", "setfit_text")


@pytest.mark.parametrize("client", EQUAL)
def test_client_trains_as_with_transformers(client: str, tmp_path: Path) -> None:
    outcomes = [run_client(client, library, tmp_path) for library in ("transformers", "hftrain")]
    assert compare(*outcomes) == []


@pytest.mark.parametrize("client", ["grpo", "rloo"])
def test_client_that_generates_trains_as_with_transformers(client: str, tmp_path: Path) -> None:
    """Rule: an evaluation's answers differ, as transformers' loaders draw a number from the global generator."""
    outcomes = [run_client(client, library, tmp_path) for library in ("transformers", "hftrain")]
    assert compare(*outcomes, ignored=("eval_*",)) == []


@pytest.mark.parametrize("client", ["sentence_transformer", "cross_encoder", "sparse_encoder"])
def test_sentence_transformers_train_as_with_transformers(client: str, tmp_path: Path) -> None:
    """Rule: `evaluate` returns the epoch too."""
    outcomes = [run_client(client, library, tmp_path) for library in ("transformers", "hftrain")]
    assert compare(*outcomes, returned_only=("epoch",)) == []
