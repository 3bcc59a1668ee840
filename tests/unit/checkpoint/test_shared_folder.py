"""Output folders that machines share, or do not; `tests/machines/test_folders.py` asks real machines."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hftrain.checkpoint.writer import check_shared_folder
from hftrain.core.errors import ConfigError


class Rank:
    """A thread that stands in for a process on a machine of its own, or for a second one of a machine."""

    def __init__(self, rank: int, table: list[Any], barrier: threading.Barrier, *, is_local_main: bool) -> None:
        self.rank, self.table, self.barrier, self.is_local_main = rank, table, barrier, is_local_main

    def gather_object(self, value: Any) -> list[Any]:
        self.table[self.rank] = value
        self.barrier.wait()
        found = [*self.table]
        self.barrier.wait()
        return found


@pytest.mark.parametrize(
    ("names", "on_each_node", "said"),
    [
        (["a", "a", "a"], False, None),
        (["a", "a", "b"], False, "does not find in {}/b"),
        (["a", "b"], True, None),
        (["a", "b", "b"], True, "write to the same storage"),
        (["a", "a second"], True, None),
        (["a", "a second"], False, None),
        (["a", "file/run"], False, "cannot write there: "),
        (["a", "file/run"], True, "cannot write there: "),
    ],
)
def test_all_say_what_is_wrong_with_the_folders_and_nothing_is_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], on_each_node: bool, said: str | None
) -> None:
    monkeypatch.setattr("hftrain.storage.files._LOOK_S", 0.001)
    (tmp_path / "file").touch()
    table: list[Any] = [None] * len(names)
    barrier = threading.Barrier(len(names), timeout=20)

    def check(rank: int) -> str | None:
        name, _, second = names[rank].partition(" ")
        strategy: Any = Rank(rank, table, barrier, is_local_main=not second)
        try:
            check_shared_folder(tmp_path / name, strategy, on_each_node=on_each_node)
        except ConfigError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(check, range(len(names))))
    for answer in answers:
        assert answer is None if said is None else said.format(tmp_path) in (answer or "")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "file"]
