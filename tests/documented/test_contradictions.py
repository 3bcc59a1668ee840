"""What hftrain does where the documentation contradicts itself; docs/design/contradictions.md says why."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.source import ROOT
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, Trainer, TrainerCallback, TrainingArguments

train = partial(tiny.train, eval_dataset=make_rows(5))


def test_every_contradiction_has_an_entry() -> None:
    text = (ROOT / "docs/design/contradictions.md").read_text(encoding="utf-8")
    between_documents = [f"R{number}" for number in range(640, 666)]
    in_part = ["R122", "R158", "R312", "R561", "R229"]
    assert re.findall(r"^## (R\d+)[:,]", text, re.MULTILINE) == between_documents + in_part
    for part in ("*The documentation:*", "*hftrain:*", "*Why:*"):
        assert text.count(part) == 31


def test_overwriting_deletes_nothing(tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("mine", encoding="utf-8")
    train(tmp_path, max_steps=2, save_strategy="steps", save_steps=1)
    train(tmp_path, max_steps=1, save_strategy="steps", save_steps=1, overwrite_output_dir=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
        "journal.jsonl",
        "notes.txt",
    ]


class Stop(TrainerCallback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if state.global_step < 2:
            return {} if self.how == "dict" else None
        if self.how == "dict":
            return {"should_training_stop": True}
        control.should_training_stop = True
        return control if self.how == "control" else None


@pytest.mark.parametrize("how", ["dict", "control", "nothing"])
@pytest.mark.parametrize("keyword", ["callback", "callbacks"])
def test_callbacks_answer_in_three_ways_under_two_keywords(tmp_path: Path, how: str, keyword: str) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path), train_dataset=make_rows(), **{keyword: [Stop(how)]})  # type: ignore[arg-type]
    assert trainer.train().global_step == 2


def test_both_keywords_of_callbacks_add_up(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="two callbacks of the type Stop"):
        trainer = Trainer(Net(), make_arguments(tmp_path), callback=[Stop("a")], callbacks=[Stop("b")])
    assert [each.how for each in trainer.callback_handler.callbacks if isinstance(each, Stop)] == ["b", "a"]


def test_signature_rules_the_defaults_of_set_logging() -> None:
    args = TrainingArguments("out", report_to="none").set_logging()
    assert (args.logging_nan_inf_filter, args.log_on_each_node, args.report_to) == (False, False, [])


def test_no_delay_is_zero() -> None:
    assert TrainingArguments("out").set_evaluate(strategy="steps", delay=None).eval_delay == 0


@pytest.mark.parametrize("value", ["", False, None, []])
def test_sharding_of_fairscale_that_is_off(value: Any) -> None:
    assert TrainingArguments("out", sharded_ddp=value) == TrainingArguments("out")


@pytest.mark.parametrize("alpha", [0.1, 5, 15])
def test_any_noise_is_taken(alpha: float) -> None:
    assert TrainingArguments("out", neftune_noise_alpha=alpha).neftune_noise_alpha == alpha


def test_processes_meet_when_training_starts_and_not_when_a_device_is_read(tmp_path: Path) -> None:
    args = make_arguments(tmp_path, max_steps=1)
    trainer = Trainer(Net(), args, train_dataset=make_rows(4), strategy="ddp")
    assert args.device == torch.device("cpu")
    assert not torch.distributed.is_initialized()
    trainer.train()
    assert torch.distributed.is_initialized()
    trainer.strategy.close()


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "words", ["simple offload", "simple auto_wrap", "simple zero_dp_2", "offload", "zero_dp_2 zero_dp_3"]
)
def test_options_of_fairscale_that_do_not_go_together_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=r"'simple' goes with no other option|Add 'full_shard'|sharded in one way"):
        TrainingArguments("out", sharded_ddp=words)
