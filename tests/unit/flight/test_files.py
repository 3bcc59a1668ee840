"""The files of a flight log in a remote output folder: uploaded, continued elsewhere, and read from there."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.remote import URL, failing, listing
from support.tiny import make_resumable
from unit.flight.test_flight import Fail

from hftrain import ConfigError, FlightLog
from hftrain.cli.blame import show_blame
from hftrain.cli.replay import show_replay
from hftrain.extras.flight.files import Ledger
from hftrain.extras.flight.reading import flight_folder, read_ledger, read_sessions
from hftrain.storage.files import mirror_of

pytestmark = pytest.mark.usefixtures("store")


def train(folder: Any, fails_at: int | None = None, resume: bool = False, **options: Any) -> None:
    logged = {"flight_log": FlightLog(flush_every=3), "max_steps": 8, "save_steps": 2, **options}
    make_resumable(folder, Fail(fails_at), **logged).train(resume_from_checkpoint=resume)


def steps(run: Any) -> list[Any]:
    return [{**line, "ms": None} for (line,) in read_ledger(run).values()]


def test_a_remote_log_is_whole_and_goes_on_on_another_machine(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(RuntimeError, match="as asked"):
        train(URL, 5)
    assert [line["step"] for line in steps(URL)] == [1, 2, 3, 4, 5]
    shutil.rmtree(mirror_of(URL))
    train(URL, resume=True)
    assert steps(URL) == steps(tmp_path)
    assert [line["begin"] for line in read_sessions(URL)] == [0, 4]
    assert show_blame(URL, step=3).data["suspects"]
    with pytest.raises(ConfigError, match="Copy the folder to this machine"):
        show_replay(URL, step=3, output=str(tmp_path / "again"))


def test_a_copy_is_brought_up_to_date(tmp_path: Path) -> None:
    train(URL, max_steps=4)
    assert len(steps(URL)) == 4
    train(URL, resume=True)
    assert len(steps(URL)) == 8
    assert flight_folder(tmp_path) == tmp_path / "flight"


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_process_of_another_machine_uploads_its_lines(local_rank: int) -> None:
    make = partial(Ledger, URL, strategy=SimpleNamespace(rank=1, local_rank=local_rank), rotate_bytes=60)
    ledger = make()
    for step in range(1, 5):
        ledger.append([{"step": step, "norm": 1.0, "padding": "x" * 20}])
    ledger.send()
    names = [name for name in listing() if name.startswith("flight/")]
    assert bool(names) == (local_rank != 1)
    if names:
        shutil.rmtree(mirror_of(URL))
        make().append([{"step": 5}])
        make().send()
        assert list(read_ledger(URL)) == [1, 2, 3, 4, 5]


def test_a_store_that_fails_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, "put_file", times=99, error=OSError("no"), only=lambda path: "flight/" in path)
    ledger = Ledger(URL, strategy=SimpleNamespace(rank=1, local_rank=0), rotate_bytes=1000)
    ledger.append([{"step": 1}])
    with pytest.warns(UserWarning, match="flight log"):
        ledger.send()
    assert json.loads((ledger.folder / "rank1.jsonl").read_text()) == {"step": 1}
