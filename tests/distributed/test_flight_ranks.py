"""The flight log on two processes: the samples of each, equal replicas, one fingerprint however it is sharded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import Net, Stream, make_arguments, make_rows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from unit.cli.test_replay import SCRIPT

from hftrain import FlightLog, Trainer, TrainerCallback, default_data_collator, set_seed
from hftrain.cli.bisect import show_bisect
from hftrain.cli.replay import SampleObserver
from hftrain.extras.flight.fingerprint import Fingerprint
from hftrain.extras.flight.reading import read_ledger

pytestmark = pytest.mark.distributed


class Drift(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and args.process_index == 1:
            with torch.no_grad():
                next(kwargs["model"].parameters())[0, 0] += 1e-3


def train(folder: Path, strategy: str, *callbacks: Any, kind: Any = Trainer, rows: Any = None, **options: Any) -> Any:
    set_seed(3)
    parts = {"flight_log": FlightLog(flush_every=3)}
    parts |= {name: options.pop(name) for name in ("flight_log", "exclude_samples") if name in options}
    settings = {"num_train_epochs": 2, "per_device_train_batch_size": 3, "learning_rate": 0.01, **options}
    args, rows = make_arguments(folder, **settings), make_rows(30) if rows is None else rows
    trainer = kind(Net(), args, train_dataset=rows, strategy=strategy, callbacks=list(callbacks), **parts)
    trainer.train()
    trainer.strategy.close()
    return trainer


class Unshared(Trainer):
    """Say that the data is shared already, which it is not."""

    def get_train_dataloader(self) -> Any:
        sampler: Any = torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]
        sampler.rank, sampler.num_replicas = self.args.process_index, 2
        return torch.utils.data.DataLoader(self.train_dataset, 3, sampler=sampler, collate_fn=self.data_collator)


def warnings_of(folder: Path, kind: Any = Trainer, **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(folder, kind=kind, **options)
    return [str(each.message) for each in caught]


def train_warned(folder: str) -> dict[str, list[str]]:
    home = Path(folder)
    rows = Stream(make_rows(30))
    rows.world_size = 1  # each process yields all samples
    stream = {"rows": rows, "max_steps": 8, "num_train_epochs": 3}
    return {
        "ddp": warnings_of(home / "ddp", strategy="ddp"),
        "fsdp": warnings_of(home / "fsdp", strategy="fsdp", gradient_accumulation_steps=2),
        "stream": warnings_of(home / "stream", strategy="ddp", **stream),
        "undispatched": warnings_of(
            home / "own", strategy="ddp", **stream, accelerator_config={"dispatch_batches": False}
        ),
        "copies": warnings_of(home / "copies", Unshared, strategy="ddp"),
    }


def test_sound_runs_are_told_nothing_and_data_that_is_not_shared_is_named(run_distributed: Any, tmp_path: Path) -> None:
    found = run_distributed(train_warned, folder=str(tmp_path))
    for each in found:
        assert [name for name, told in each.items() if told] == ["copies"]
        assert each["copies"] == [
            "The processes 0 and 1 read the same samples in the steps 1 to 2: the data is not split among them.",
        ]
    for name in ("stream", "own"):
        ledger = read_ledger(tmp_path / name)
        samples = [each for step in range(1, 6) for line in ledger[step] for each in line["samples"][0]]
        assert len(set(samples)) == 30


def train_each(folder: str) -> dict[str, Any]:
    for name in ("ddp", "fsdp"):
        train(Path(folder) / name, name)
    train(Path(folder) / "some", "ddp", exclude_samples=[4, 9])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(Path(folder) / "drift", "ddp", Drift())
    return {"warned": [str(each.message) for each in caught if "different weights" in str(each.message)]}


def shard_each(folder: str) -> list[int]:
    mesh = init_device_mesh("cpu", (2,))
    set_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.LayerNorm(3))
    whole = Fingerprint(model.parameters(), size=11)
    numbers = [int(whole.text_of(step, int(whole.of(step)[0])), 16) for step in range(whole.num_parts)]
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = Fingerprint(model.parameters(), size=11)
    assert parts.is_split
    own = [int(parts.text_of(step, int(parts.of(step)[0])), 16) for step in range(parts.num_parts)]
    told: list[Any] = [None, None]
    torch.distributed.all_gather_object(told, own)
    return [(sum(each) - number) % 2**64 for *each, number in zip(*told, numbers, strict=True)]


def test_fingerprints_of_shards_add_up_to_that_of_the_whole(run_distributed: Any, tmp_path: Path) -> None:
    for found in run_distributed(shard_each, folder=str(tmp_path)):
        assert len(found) > 3
        assert set(found) == {0}


def test_each_process_tells_its_samples_and_replicas_agree(run_distributed: Any, tmp_path: Path) -> None:
    found = run_distributed(train_each, folder=str(tmp_path))
    for name in ("ddp", "fsdp"):
        ledger = read_ledger(tmp_path / name)
        assert [len(lines) for lines in ledger.values()] == [2] * 10
        for epoch in (range(1, 6), range(6, 11)):
            samples = [each for step in epoch for line in ledger[step] for each in line["samples"][0]]
            assert sorted(samples) == list(range(30))
    for mine, other in read_ledger(tmp_path / "ddp").values():
        assert (mine["weights"], mine["gradients"]) == (other["weights"], other["gradients"])
    assert not {4, 9} & {
        each for lines in read_ledger(tmp_path / "some").values() for line in lines for each in line["samples"][0]
    }
    for each in found:
        assert "different weights after step 6" in each["warned"][0]


def test_a_step_of_two_processes_is_done_again_to_the_bit(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    options = ["--workers", "1", "--accumulation", "2"]
    run = partial(subprocess.run, cwd=tmp_path, check=True, capture_output=True, text=True)
    run([*torchrun, "train.py", "run", *options])
    command = ["--no-python", sys.executable, "-c", "from hftrain.cli.commands import main; main()"]
    done = run([*torchrun, *command, "replay", "run", "--step", "10", "-o", "again"])
    assert "All steps since are the same to the bit." in done.stdout
    assert {"batches-rank1.pt", "modules-rank1.json"} <= {path.name for path in (tmp_path / "again").iterdir()}


def test_the_module_that_differs_on_one_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone", "train.py"]
    for words in (["a"], ["b", "--fault", "gradient1"]):
        subprocess.run([*torchrun, *words], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    where = "backward, the gradient of the output of blocks.2.1 (Dropout), on rank 1 only"
    answer = show_bisect(["a", "b"])
    assert (answer.data["step"], answer.data["where"]) == (13, where)


def collate_but(num: int, rows: list[Any]) -> Any:
    """Leave the last samples out, so that the processes have different numbers of them."""
    return default_data_collator(rows[: len(rows) - num])


def observe_each(folder: str) -> None:
    for name in ("ddp", "fsdp"):
        set_seed(3)
        path = Path(folder) / name
        args = make_arguments(path, num_train_epochs=2, per_device_train_batch_size=3, learning_rate=0.01)
        shorten = partial(collate_but, int(os.environ["RANK"]))
        trainer = Trainer(
            Net(), args, train_dataset=make_rows(30), strategy=name, flight_log=True, data_collator=shorten
        )
        trainer.add_callback(SampleObserver(5, path, trainer))
        trainer.train()
        trainer.strategy.close()


def test_processes_compute_their_samples_alone(run_distributed: Any, tmp_path: Path) -> None:
    run_distributed(observe_each, folder=str(tmp_path))
    losses = []
    for name in ("ddp", "fsdp"):
        found = [json.loads((tmp_path / name / f"samples-rank{rank}.json").read_text()) for rank in (0, 1)]
        assert [len(each["samples"]) for each in found] == [3, 2]
        assert [each["norm"] is None for part in found for each in part["samples"]] == [name == "fsdp"] * 5
        losses.append([each["loss"] for part in found for each in part["samples"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    lines = read_ledger(tmp_path / "ddp")[5]
    assert sum(losses[0]) / 5 == pytest.approx(sum(line["losses"][0] for line in lines) / 2, rel=1e-5)
