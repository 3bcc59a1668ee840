"""The documented way to give one log level to a script and to the libraries it uses."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from support.tiny import Net, make_arguments, make_rows  # noqa: E402

from hftrain import Trainer  # noqa: E402

pytestmark = pytest.mark.interop

LIBRARIES = ("transformers", "datasets", "hftrain")


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in LIBRARIES}
    handlers = list(logging.getLogger("hftrain").handlers)
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
    logging.getLogger("hftrain").handlers[:] = handlers


@pytest.mark.parametrize(("rank", "level"), [(0, logging.ERROR), (1, logging.CRITICAL)])
def test_level_of_the_process_serves_every_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, level: int
) -> None:
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", "2")
    training_args = make_arguments(tmp_path, log_level="error", log_level_replica="critical")
    logger = logging.getLogger("my_script")

    logging.basicConfig(
        format="%(asctime)s - %(levelname)s - %(name)s - %(message)s",
        datefmt="%m/%d/%Y %H:%M:%S",
        handlers=[logging.StreamHandler(sys.stdout)],
    )
    log_level = training_args.get_process_log_level()
    logger.setLevel(log_level)
    datasets.utils.logging.set_verbosity(log_level)
    transformers.utils.logging.set_verbosity(log_level)

    monkeypatch.delenv("RANK")
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert log_level == level
    if rank == 0:
        Trainer(Net(), training_args, train_dataset=make_rows())
        assert {logging.getLogger(name).getEffectiveLevel() for name in LIBRARIES} == {level}


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING, logging.ERROR])
def test_passive_level_is_that_of_transformers(tmp_path: Path, level: int) -> None:
    training_args, theirs = make_arguments(tmp_path), transformers.TrainingArguments(str(tmp_path))
    logging.getLogger("hftrain").setLevel(logging.NOTSET)
    transformers.utils.logging.set_verbosity(level)
    assert training_args.get_process_log_level() == theirs.get_process_log_level() == level
    logging.getLogger("hftrain").setLevel(logging.DEBUG)
    assert training_args.get_process_log_level() == logging.DEBUG
