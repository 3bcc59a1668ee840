"""`hftrain replay` and `hftrain bisect`, on runs of scripts in processes of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.forked_python import ForkedPython

from hftrain import ConfigError
from hftrain.cli.bisect import show_bisect
from hftrain.cli.replay import show_replay
from hftrain.extras.flight.observing import first_difference, first_not_finite
from hftrain.extras.flight.reading import first_parting

SCRIPT = """
import argparse
import os
import torch
from torch import nn
from hftrain import Trainer, TrainingArguments, set_seed

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--accumulation", type=int, default=1)
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--fault", default="")
parser.add_argument("--rate", type=float, default=1e-2)
options = parser.parse_args()


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        rows = torch.randn(60, 9, generator=torch.Generator().manual_seed(0))
        return {"x": rows[index, :8] + 0.1 * torch.randn(8), "labels": rows[index, 8]}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        rates = [0.1, options.dropout, 0.1]
        layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(rate)) for rate in rates]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(8, 1)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x, labels=None):
        self.steps += self.training
        for block in self.blocks:
            x = torch.tanh(block(x))
        if options.fault in ("gradient", "gradient" + os.environ.get("RANK", "")) and self.steps == 13:
            x.register_hook(lambda gradient: gradient * 1.5)
        y = self.head(x).squeeze(1)
        if options.fault == "nan" and self.steps == 13:
            y = y.log()
        return {"loss": (y - labels).square().mean(), "logits": y}


set_seed(0)
args = TrainingArguments(
    options.folder, max_steps=20, per_device_train_batch_size=options.batch, save_steps=6, logging_steps=10,
    report_to="none", disable_tqdm=True, dataloader_num_workers=options.workers, bf16=options.bf16,
    learning_rate=options.rate, gradient_accumulation_steps=options.accumulation, use_cpu=True,
)
Trainer(Net(), args, train_dataset=Noisy(), flight_log=True).train()
"""


PYTHON = ForkedPython()


@pytest.fixture(scope="module", autouse=True)
def python() -> Iterator[None]:
    with PYTHON.replaying():
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "train.py").write_text(SCRIPT)
    return folder


def train(home: Path, name: str, *options: str, **variables: str) -> str:
    PYTHON.run(["train.py", name, *options], home, **variables).check_returncode()
    return str(home / name)


def test_changed_arguments_show_where_it_parts(home: Path, tmp_path: Path) -> None:
    run = train(home, "changed")
    answer = show_replay(run, step=11, output=str(tmp_path / "a"), changes=["args.bf16=true"])
    assert answer.data["parted"] == 7
    assert answer.data["differs"][0] == "losses"
    script = ["train.py", "other", "--dropout", "0.2"]
    answer = show_replay(run, step=11, output=str(tmp_path / "b"), script=script)
    assert (answer.data["parted"], answer.data["differs"][0]) == (7, "losses")


@pytest.mark.filterwarnings("ignore:The loss was NaN or infinite")
def test_the_first_nan_is_named(home: Path, tmp_path: Path) -> None:
    run = train(home, "nan", "--fault", "nan")
    answer = show_replay(run, step=13, output=str(tmp_path / "a"))
    assert answer.data["first_not_finite"] == "forward, (the model) (Net)"


def test_runs_that_differ_in_an_argument_or_not_at_all(home: Path, tmp_path: Path) -> None:
    base = train(home, "same")
    answer = show_bisect([base, train(home, "rate", "--rate", "0.02")], output=str(tmp_path / "a"))
    assert answer.data["differs"][0] == "rate"
    assert "argument learning_rate: 0.01 and 0.02" in answer
    assert not (tmp_path / "a").exists()
    answer = show_bisect([base, train(home, "same_again")], output=str(tmp_path / "a"))
    assert answer == ["The runs are the same to the bit up to step 20."]


def test_what_differs_around_is_listed(home: Path, tmp_path: Path) -> None:
    runs = [train(home, f"around{seed}", PYTHONHASHSEED=seed) for seed in "12"]
    path = Path(runs[1]) / "flight" / "rank0.jsonl"
    text = path.read_text()
    path.write_text(text.replace('"dataset": "Noisy", "samples": 60', '"dataset": "Noisy", "samples": 61'))
    environment = 'environment PYTHONHASHSEED: "1" and "2"'
    assert show_bisect(runs)[1:] == ["data samples: 60 and 61", environment]
    path.write_text(text.replace('"data": {', '"other": {'))  # an older log
    assert show_bisect(runs)[1:] == [environment]
    assert show_bisect(runs, steps=7)[0] == "The runs are the same to the bit up to step 7."


def test_runs_that_round_differently_are_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"argument bf16, precision.*hftrain prove"):
        show_bisect([train(home, "precise"), train(home, "coarse", "--bf16")])


def test_what_cannot_be_replayed(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no flight log"):
        show_replay(str(tmp_path), step=3)
    run = train(home, "refused")
    with pytest.raises(ConfigError, match="steps 1 to 20"):
        show_replay(run, step=21, output=str(tmp_path / "a"))
    with pytest.raises(ConfigError, match="not empty"):
        show_replay(run, step=3, output=run)
    with pytest.raises(ConfigError, match="script does not exist"):
        show_replay(run, step=3, output=str(tmp_path / "b"), script=["missing.py"])
    (home / "idle.py").write_text("print('nothing')")
    with pytest.raises(ConfigError, match=r"without a call of Trainer\.train"):
        show_replay(run, step=3, output=str(tmp_path / "c"), script=["idle.py"])
    with pytest.raises(ConfigError, match=r"not args\.NAME=VALUE"):
        show_replay(run, step=3, output=str(tmp_path / "d"), changes=["bf16"])


def call(module: str, bits: str, *, gradient: str = "0", is_finite: bool = True, settings: str = "") -> dict[str, Any]:
    facts = {"bits": bits, "is_finite": is_finite}
    gradients = [{"bits": gradient, "is_finite": is_finite}]
    return {
        "module": module, "type": "Linear", "settings": settings, "inputs": [], "outputs": [facts],
        "gradients": gradients,
    }  # fmt: skip


def test_differences_of_observed_steps() -> None:
    base = [call("a", "1"), call("b", "2")]

    def differ(other: list[dict[str, Any]]) -> str:
        return str(first_difference([base], [other]))

    assert differ(json.loads(json.dumps(base))) == "None"
    assert differ([call("a", "1"), call("b", "3", settings="p=2")]) == "forward, b (Linear):  and p=2"
    assert differ([call("a", "1")]) == "forward, 2 and 1 calls of modules"
    assert "are called" in differ([call("c", "1"), call("b", "2")])
    other = [call("a", "1", gradient="5"), call("b", "2", gradient="5")]
    assert differ(other) == "backward, the gradient of the output of b (Linear)"
    assert first_not_finite(base) is None
    assert first_not_finite([call("a", "1"), call("b", "2", is_finite=False)]) == "forward, b (Linear)"


def test_differences_name_the_ranks() -> None:
    base = [call("a", "1"), call("b", "2")]
    late, later = [base[0], call("b", "3")], [call("a", "1", gradient="5"), base[1]]
    assert first_difference([base] * 3, [late, base, base]) == "forward, b (Linear), on rank 0 only"
    assert first_difference([base] * 3, [base, late, late]) == "forward, b (Linear), on ranks 1, 2 only"
    assert first_difference([base] * 2, [later, late]) == "forward, b (Linear), on rank 1 only"
    assert first_difference([base] * 2, [late] * 2) == "forward, b (Linear)"


def test_the_process_that_differs_is_shown() -> None:
    same = {"norm": 1.0, "losses": [0.5]}
    mine, other = {3: [same, same]}, {3: [same, {**same, "norm": 2.0}]}
    assert first_parting(mine, other) == (3, ["norm"], "norm 1.0 and 2.0")
    assert first_parting(mine, {3: [same, same], 4: [same]}) == (None, [], "")
