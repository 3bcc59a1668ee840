"""Reading flight logs that are damaged, or that a run of another size has left behind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.tiny import make_arguments, make_rows
from torch import nn

from hftrain import ConfigError, Trainer, set_seed
from hftrain.cli.blame import show_blame
from hftrain.extras.flight.reading import FOLDER, read_ledger


def write(run: Path, name: str, lines: list[dict[str, Any]]) -> Path:
    path = run / FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if name.endswith(".gz") else data)
    return path


def steps(first: int, last: int, loss: float = 1.0) -> list[dict[str, Any]]:
    return [{"step": step, "losses": [loss + step % 3], "samples": [[step]]} for step in range(first, last + 1)]


def begin(step: int, world_size: int) -> dict[str, Any]:
    return {"begin": step, "world_size": world_size}


def test_ranks_that_a_run_no_longer_has_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, "rank0.jsonl", [begin(0, 2), *steps(1, 12), begin(8, 1), *steps(9, 20)])
    write(tmp_path, "rank1.jsonl", [begin(0, 2), *steps(1, 12)])
    assert [len(lines) for lines in read_ledger(tmp_path).values()] == [2] * 8 + [1] * 12
    write(tmp_path, "rank0.jsonl", [begin(0, 1), *steps(1, 4)])
    assert [len(lines) for lines in read_ledger(tmp_path).values()] == [1] * 4


def test_of_a_damaged_file_the_rest_is_read(tmp_path: Path) -> None:
    packed = write(tmp_path, "rank0.0000.jsonl.gz", [begin(0, 1), *steps(1, 3000)])
    write(tmp_path, "rank0.jsonl", steps(3001, 3005))
    whole, random = packed.read_bytes(), Random(0)
    packed.write_bytes(whole[: len(whole) // 2])
    assert {1, 2, 1000, 3001, 3005} <= set(read_ledger(tmp_path)) < set(range(1, 3006))
    for _ in range(50):
        damaged = bytearray(whole[: random.randrange(len(whole))])
        for _ in range(random.randrange(3)):
            damaged[random.randrange(len(damaged) or 1) :][:1] = bytes([random.randrange(256)])
        packed.write_bytes(damaged)
        assert set(range(3001, 3006)) <= set(read_ledger(tmp_path))


def test_a_log_is_read_wherever_it_ends_or_is_damaged(tmp_path: Path) -> None:
    path = write(tmp_path, "rank0.jsonl", [begin(0, 1), *steps(1, 20), *steps(21, 21, 99.0)])
    whole, random = path.read_bytes(), Random(0)
    for _ in range(300):
        damaged = bytearray(whole[: random.randrange(1, len(whole) + 1)])
        for _ in range(random.randrange(4)):
            damaged[random.randrange(len(damaged))] = random.choice(b'\0\n"[]{},:0123456789enul\xff')
        path.write_bytes(damaged)
        try:
            show_blame(str(tmp_path))
        except ConfigError as error:
            assert "no flight log" in str(error)  # noqa: PT017


@pytest.mark.parametrize("line", [{"begin": True}, {"begin": 0}, {"step": None}, {"step": 2, "losses": 3}, [], 7])
def test_lines_of_another_kind_are_left_out(tmp_path: Path, line: Any) -> None:
    write(tmp_path, "rank0.jsonl", [begin(0, 1), line, *steps(1, 20)])
    assert set(read_ledger(tmp_path)) == set(range(1, 21))
    show_blame(str(tmp_path))


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x).squeeze(1) - labels).square().mean()}


def train(folder: Path, *, spoiled: int | None = None) -> None:
    set_seed(3)
    rows = [{**row, "x": row["x"] * (1000 if at == spoiled else 1)} for at, row in enumerate(make_rows(40))]
    args = make_arguments(folder, num_train_epochs=3, per_device_train_batch_size=4, learning_rate=1e-6)
    Trainer(Line(), args, train_dataset=rows, flight_log=True).train()


def test_kept_batches_of_another_run_or_damaged_ones_are_not_shown(tmp_path: Path) -> None:
    train(tmp_path, spoiled=8)
    kept = sorted((tmp_path / FOLDER / "spikes").iterdir())
    assert any(each["shown"] for each in show_blame(str(tmp_path)).data["suspects"])
    for path in kept:
        path.write_bytes(path.read_bytes()[:500])
    suspects = show_blame(str(tmp_path)).data["suspects"]
    assert suspects[0]["sample"] == 8
    assert not any(each["shown"] for each in suspects)
    torch.save([], kept[0].with_name("step00009999-rank0.pt"))
    train(tmp_path)
    assert list((tmp_path / FOLDER / "spikes").iterdir()) == []
