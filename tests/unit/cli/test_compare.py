"""`hftrain compare`: what it says of runs, how often it is wrong, and runs that it trains."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hftrain import ConfigError
from hftrain.cli.compare import shared, show_compare
from hftrain.extras.compare import Comparison

SCRIPT = """
import sys
import torch
from torch import nn
from PACKAGE import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": nn.functional.cross_entropy(logits, labels) * float(sys.argv[2]), "logits": logits}

rows = [{"x": torch.arange(4.0) - number % 3, "labels": number % 3} for number in range(40)]
args = TrainingArguments("run", learning_rate=float(sys.argv[1]), max_steps=4, report_to="none")
Trainer(Net(), args, train_dataset=rows[:30], eval_dataset=rows[30:]).train()
print("trained on")
"""


def write_run(folder: Path, seed: int, **metrics: float) -> None:
    folder.mkdir(parents=True)
    (folder / "compare.json").write_text(json.dumps({"seed": seed}), encoding="utf-8")
    state = {"global_step": 8, "log_history": [{"step": 4, "eval_loss": 9.0}, {"step": 8, **metrics}]}
    (folder / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")


def write_pairs(folder: Path, *pairs: tuple[float, float], metric: str = "eval_loss") -> list[str]:
    for seed, pair in enumerate(pairs):
        for side, value in zip("ab", pair, strict=True):
            write_run(folder / f"{side}-{seed}", seed, **{metric: value})
    return [str(folder / "a-*"), str(folder / "b-*")]


# -- how often it is wrong -------------------------------------------------------------------------------------------


def verdicts(draw: Callable[[random.Random], tuple[float, float]], *, least: float = 0.0) -> Counter[str]:
    """Return the shares of what comparisons come to that look after each pair, up to 12, and stop when they know."""
    numbers, found = random.Random(0), Counter[str]()
    for _ in range(1000):
        one, two, verdict = list[float](), list[float](), "not known"
        while verdict == "not known" and len(one) < 12:
            for side, value in zip((one, two), draw(numbers), strict=True):
                side.append(value)
            verdict = Comparison(one, two, is_higher_better=False, least=least).verdict
        found[verdict] += 1
    return Counter({name: number / 1000 for name, number in found.items()})


@pytest.mark.parametrize(
    "draw",
    [
        lambda numbers: (numbers.gauss(0, 1), numbers.gauss(0, 1)),
        lambda numbers: (0.9, 0.9 + numbers.choice((-0.05, 0.05))),  # an accuracy that one sample decides
    ],
)
def test_without_a_difference_it_seldom_finds_one(draw: Any) -> None:
    found = verdicts(draw)
    # At most 0.05, and three standard deviations of a share of 1,000.
    assert 0 < found["A is better"] + found["B is better"] < 0.05 + 0.021


def test_it_finds_a_difference_and_seldom_denies_one_that_matters() -> None:
    assert verdicts(lambda numbers: (numbers.gauss(0, 1), numbers.gauss(0, 1) - 3))["B is better"] > 0.98
    assert verdicts(lambda numbers: (numbers.gauss(0, 1), numbers.gauss(0, 1)), least=2.0)["no difference"] > 0.8
    assert verdicts(lambda numbers: (numbers.gauss(0, 1), numbers.gauss(0, 1) + 2), least=2.0)["no difference"] < 0.05


# -- runs that exist -------------------------------------------------------------------------------------------------


def test_runs_are_paired_by_seed_and_the_last_evaluation_counts(tmp_path: Path) -> None:
    sides = write_pairs(tmp_path, (0.5, 0.4), (0.7, 0.61), (0.9, 0.8))
    write_run(tmp_path / "a-10", 10, eval_loss=3.0)
    found = show_compare(sides)
    assert found[5].startswith("B is better by 0.097 +/- 0.028 (eval_loss, lower is better, pairs: 3).")
    assert found[6].endswith("differ by 0.28, the runs of a pair by 0.0058: pairing saves about 100% of the runs.")
    assert found[-1] == "Left out, because only one side has them: seeds 10."
    assert (found.status, show_compare(sides[::-1]).status) == (0, 1)
    assert show_compare(sides[::-1], better="higher").data["verdict"] == "B is better"
    assert [pair["seed"] for pair in found.data["pairs"]] == [0, 1, 2]


def test_what_is_not_known_and_what_is_no_difference(tmp_path: Path) -> None:
    sides = write_pairs(tmp_path, (0.5, 0.51), (0.7, 0.69), (0.9, 0.905))
    found = show_compare(sides)
    assert found.status == 3
    assert "no difference larger than 0.051; more than 50 pairs needed" in found[5]
    assert show_compare(sides, min_difference=0.06)[5].startswith("No difference larger than 0.06: 0.002 +/- 0.050 (")
    assert show_compare(sides, min_difference=0.06).status == show_compare(sides[::-1], min_difference=0.06).status == 0
    assert show_compare([side.replace("*", "0") for side in sides])[3].startswith("Not known: 2 more pairs needed (")


def test_a_run_that_diverged_is_no_number(tmp_path: Path) -> None:
    sides = write_pairs(tmp_path, (0.5, float("nan")), (0.7, 0.69), (0.9, 0.905))
    found = show_compare(sides)
    assert found[5].startswith("B diverged: the metric is NaN or infinite (")
    assert (found.status, show_compare(sides[::-1]).status) == (1, 3)
    assert json.loads(found.to_json())["pairs"][0]["b"] is None
    found = Comparison([float("nan"), 1.0], [1.0, float("inf")], is_higher_better=False)
    assert (found.verdict, found.status) == ("A and B diverged", 3)


@pytest.mark.parametrize(
    ("metric", "better"), [("eval_recall_cancer", "higher"), ("eval_answer", None), ("neg_mse", None), ("wer", "lower")]
)
def test_the_better_direction_is_read_from_whole_words(tmp_path: Path, metric: str, better: str | None) -> None:
    sides = write_pairs(tmp_path, (0.5, 0.4), metric=metric)
    if better is None:
        with pytest.raises(ConfigError, match="Add --better"):
            show_compare(sides, metric=metric)
    else:
        assert show_compare(sides, metric=metric).data["better"] == better


def test_wrong_input_is_named(tmp_path: Path) -> None:
    sides = write_pairs(tmp_path, (0.5, 0.4), (0.7, 0.6), metric="eval_rate")
    (tmp_path / "train.py").write_text("import hftrain\n", encoding="utf-8")
    script, run = str(tmp_path / "train.py"), {"should_run": True, "output": str(tmp_path / "new")}
    wrong: list[tuple[str, list[str], dict[str, Any]]] = [
        (r"eval_accuracy of .*a-0\. It has logged none\. Did you mean 'eval_rate'", sides, {"metric": "eval_accuracy"}),
        ("eval_rate. Its name does not say whether higher is better. Add --better", sides, {"metric": "eval_rate"}),
        (r"The seeds of A are \[0\], those of B \[1\]", [str(tmp_path / "a-0"), str(tmp_path / "b-1")], {}),
        ("both name it", [sides[0], sides[0]], {}),
        ("There is no such folder", [sides[0], "absent"], {}),
        ("It is not a distance", sides, {"min_difference": -1.0}),
        ("Add --run", sides, {"seeds": "3"}),
        ("auto, how many, or which", [script, f"{script} 1"], run | {"seeds": "0"}),
        ("does not begin with a Python file", [script, "absent.py"], run),
        ("A and B are the same", [script, f"python {script}"], run),
        (f"Cannot train '{script} 1' with seed 1.*without a call of Trainer.train", [script, f"{script} 1"], run),
    ]
    for message, given, options in wrong:
        with pytest.raises(ConfigError, match=message):
            show_compare(given, **options)
    assert not (tmp_path / "new").exists()


# -- runs that are made ----------------------------------------------------------------------------------------------


def test_commands_are_trained_in_pairs_once(tmp_cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("train.py").write_text(SCRIPT.replace("PACKAGE", "hftrain"), encoding="utf-8")
    found = show_compare(["train.py 0.01 1", "train.py 0.02 1"], should_run=True, seeds="2")
    assert found.data["shared"] == {
        "samples": ["the same indices, in the same order"], "weights at the start": ["the same"],
        "global random numbers": ["the same"],
    }  # fmt: skip
    assert found.status == 3
    values = {(pair["seed"], side): pair[side] for pair in found.data["pairs"] for side in "ab"}
    assert len(set(values.values())) == 4
    assert shared("compare/a-seed1", "compare/a-seed2")["samples"] == "not the same from number 1 on"
    assert shared("compare/a-seed1", "compare/a-seed2")["weights at the start"] == "not the same"
    before = capsys.readouterr().err
    assert before.count("seed 1: eval_loss A") == 1
    again = show_compare(["compare/a-*", "compare/b-*"])
    assert again.data["pairs"] == found.data["pairs"]
    more = show_compare(["train.py 0.01 1", "train.py 0.02 1"], should_run=True, seeds="1,2")
    assert more.data["pairs"] == found.data["pairs"]
    assert "compare/a-seed1 was there, and is used as it is." in list(more)
    with pytest.raises(ConfigError, match="another command, or the code next to its script has changed"):
        show_compare(["train.py 0.01 1", "train.py 0.03 1"], should_run=True)


def test_a_change_without_effect_ends_it(tmp_cwd: Path) -> None:
    Path("train.py").write_text(SCRIPT.replace("PACKAGE", "hftrain"), encoding="utf-8")
    found = show_compare(["train.py 0.01 1", "train.py 0.010 1"], should_run=True)
    assert found[3].startswith("A and B are the same to the bit: what was changed has no effect (")
    assert (found.status, len(found.data["pairs"])) == (0, 1)


@pytest.mark.interop
def test_scripts_of_transformers_are_trained_with_hftrain(tmp_cwd: Path) -> None:
    Path("train.py").write_text(SCRIPT.replace("PACKAGE", "transformers"), encoding="utf-8")
    found = show_compare(["train.py 0.01 1", "train.py 0.01 nan"], should_run=True)
    assert found.data["verdict"] == "B diverged"
    assert (found.status, len(found.data["pairs"])) == (1, 1)
