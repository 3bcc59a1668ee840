"""Libraries that derive their trainers from transformers' train with hftrain as they do with transformers.

``-k ENVIRONMENT`` selects the tests of what is installed. If ``CLIENTS_RESULTS`` names a folder, it gets what
`docs/clients.md` shows: ``python docs/tables.py`` writes the page.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clients.cases import CLIENTS, Client
from clients.comparing import (
    TIME_LIMIT_S,
    WEIGHTS_TOLERANCE,
    Outcome,
    assert_same_bits,
    compare,
    largest_gap,
    read_outcome,
    run_clients,
    without_times,
)

pytestmark = [pytest.mark.clients, pytest.mark.timeout(2 * TIME_LIMIT_S)]

LIBRARIES = ("transformers", "hftrain")


@pytest.fixture(scope="module")
def run_all(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Client, str], Path]:
    """Return a function that runs all clients of a module in one process, once, and returns the folder of one."""
    folders: dict[tuple[str, str, str], Path] = {}

    def run(client: Client, library: str) -> Path:
        module = client.script.split(".")[0]
        key = (client.environment, module, library)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(library)
            together = [each for each in CLIENTS if (each.environment, each.script.split(".")[0]) == key[:2]]
            scripts = tuple(each.script for each in together)
            run_clients(scripts, library, folders[key], accumulation=together[0].accumulation)
        return folders[key] / client.script

    return run


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.id)
def test_client_trains_as_with_transformers(client: Client, run_all: Callable[[Client, str], Path]) -> None:
    """Log histories and the checkpoints' files and weights are equal to 1e-4, the final weights to 1e-6.

    Rule: a difference of the weights that is known must still be there.
    """
    folders = [run_all(client, library) for library in LIBRARIES]
    found, gaps = [], {}
    for number in client.accumulation:
        theirs, ours = (read_outcome(folder / str(number), number) for folder in folders)
        gaps[str(number)] = largest_gap(theirs.weights, ours.weights)
        if number not in client.apart:
            found += compare(theirs, ours, ignored=client.ignored, returned_only=client.returned_only)
        assert (theirs.trainer, theirs.overridden) == (ours.trainer, ours.overridden)
    record(client, {"trainer": theirs.trainer, "overridden": theirs.overridden, "gaps": gaps})
    assert found == []
    assert all((gap <= WEIGHTS_TOLERANCE) == (int(number) not in client.apart) for number, gap in gaps.items()), gaps


def record(client: Client, result: dict[str, Any]) -> None:
    """Write a result into the file of its environment, in the folder that the variable names."""
    if "CLIENTS_RESULTS" in os.environ:
        path = Path(os.environ["CLIENTS_RESULTS"], f"{client.environment}.json")
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        shown = {name: getattr(client, name) for name in ("library", "what", "exception")}
        versions = {name: importlib.metadata.version(name) for name in (client.library, "transformers", "torch")}
        known[client.script] = {**shown, **result, "versions": versions}
        path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


def run_one(script: str, library: str, folder: Path, *, processes: int = 1, options: tuple[str, ...] = ()) -> Outcome:
    run_clients((script,), library, folder, accumulation=(2,), processes=processes, options=options)
    return read_outcome(folder / script / "2", 2, processes)


@pytest.mark.parametrize(
    ("script", "ignored"),
    [("trl_texts.sft", ("eval_loss", "eval_mean_token_accuracy")), ("sentence_pairs.train", ())],
    ids=lambda value: f"current-{value}" if isinstance(value, str) else "",
)
def test_client_on_two_processes_trains_as_with_transformers(
    script: str, ignored: tuple[str, ...], tmp_path: Path
) -> None:
    """Rules: `evaluate` returns the epoch too with sentence-transformers; `eval_loss` is a mean over all tokens.

    With transformers it is a mean over batches. TRL's accuracy averages the batches that ranks run at the same time,
    and hftrain's ranks read a contiguous part of the data each.
    """
    theirs, ours = (run_one(script, library, tmp_path / library, processes=2) for library in LIBRARIES)
    assert compare(theirs, ours, ignored=ignored, returned_only=("epoch",)) == []
    assert largest_gap(theirs.weights, ours.weights) <= WEIGHTS_TOLERANCE


@pytest.mark.parametrize("script", ["sentence_transformer.train"], ids="current-{}".format)
def test_weights_of_a_clients_loss_are_the_same_on_two_processes(script: str, tmp_path: Path) -> None:
    """Rule: not compared with transformers, where each process trains its own copy of them."""
    trained = run_one(script, "hftrain", tmp_path, processes=2)
    assert "classifier.weight" in trained.weights


@pytest.mark.parametrize("script", ["trl_texts.sft", "sentence_transformer.train"], ids="current-{}".format)
def test_resumed_client_equals_the_uninterrupted_run(script: str, tmp_path: Path) -> None:
    whole = run_one(script, "hftrain", tmp_path / "whole", options=("--whole",))
    run_one(script, "hftrain", tmp_path / "parts", options=("--stop-after", "4"))
    resumed = run_one(script, "hftrain", tmp_path / "parts", options=("--resume",))
    assert_same_bits(resumed.weights, whole.weights)
    logs = [[without_times(entry) for entry in outcome.history] for outcome in (resumed, whole)]
    assert logs[0] == logs[1]
    assert without_times(resumed.more) == without_times(whole.more)
