"""Libraries of transformers' newest generation train with hftrain as they do with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from clients.comparing import assert_same_bits, compare, run_client, without_times

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


@pytest.mark.parametrize(
    ("client", "ignored"), [("sft", ("eval_loss", "eval_mean_token_accuracy")), ("sentence_pairs", ())]
)
def test_client_on_two_processes_trains_as_with_transformers(
    client: str, ignored: tuple[str, ...], tmp_path: Path
) -> None:
    """Rules: `evaluate` returns the epoch too with sentence-transformers; `eval_loss` is a mean over all tokens.

    With transformers it is a mean over batches. TRL's accuracy averages the batches that ranks run at the same time,
    and hftrain's ranks read a contiguous part of the data each.
    """
    outcomes = [run_client(client, library, tmp_path, processes=2) for library in ("transformers", "hftrain")]
    assert compare(*outcomes, ignored=ignored, returned_only=("epoch",)) == []


def test_weights_of_a_clients_loss_are_the_same_on_two_processes(tmp_path: Path) -> None:
    """Rule: not compared with transformers, where each process trains its own copy of them."""
    trained = run_client("sentence_transformer", "hftrain", tmp_path, processes=2)
    assert "classifier.weight" in trained.weights


@pytest.mark.parametrize("client", ["sft", "sentence_transformer"])
def test_resumed_client_equals_the_uninterrupted_run(client: str, tmp_path: Path) -> None:
    whole = run_client(client, "hftrain", tmp_path, name="whole", options=("--whole",))
    run_client(client, "hftrain", tmp_path, name="parts", options=("--stop-after", "4"))
    resumed = run_client(client, "hftrain", tmp_path, name="parts", options=("--resume",))
    assert_same_bits(resumed.weights, whole.weights)
    logs = [[without_times(entry) for entry in outcome.history] for outcome in (resumed, whole)]
    assert logs[0] == logs[1]
    assert without_times(resumed.more) == without_times(whole.more)
