"""What hftrain does where the documentation contradicts itself; docs/design/contradictions.md says why."""

from __future__ import annotations

import inspect
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.source import ROOT
from support.tiny import Net, Stream, make_arguments, make_rows

from hftrain import ConfigError, Trainer, TrainerCallback, TrainingArguments


def train(folder: Path, **options: Any) -> Trainer:
    trainer = Trainer(Net(), make_arguments(folder, **options), train_dataset=make_rows(), eval_dataset=make_rows(5))
    trainer.train()
    return trainer


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


def test_guides_name_of_the_strategy_works() -> None:
    with pytest.warns(FutureWarning, match="eval_strategy"):
        assert TrainingArguments("out", evaluation_strategy="epoch").eval_strategy == "epoch"


def test_levels_that_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    args = TrainingArguments("out")
    assert args.get_process_log_level() == logging.getLogger("hftrain").getEffectiveLevel()
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert args.get_process_log_level() == logging.WARNING


def test_folders_that_are_not_given(tmp_cwd: Path) -> None:
    assert (TrainingArguments().output_dir, Trainer(Net()).args.output_dir) == ("trainer_output", "tmp_trainer")


def test_default_optimizer(tmp_path: Path) -> None:
    assert TrainingArguments("out").optim == "adamw_torch"
    with pytest.warns(FutureWarning, match="adamw_hf"):
        trainer = Trainer(Net(), make_arguments(tmp_path, optim="adamw_hf"))
    assert type(trainer.create_optimizer()) is torch.optim.AdamW


class Scored(Net):
    def forward(self, x: Any, start_label: Any = None, end_labels: Any = None) -> Any:  # type: ignore[override]
        return super().forward(x, start_label)


class ToyForQuestionAnswering(Net):
    def forward(self, x: torch.Tensor, start_positions: Any = None, end_positions: Any = None) -> Any:
        return super().forward(x)


class Open(Net):
    def forward(self, **batch: Any) -> Any:
        return super().forward(**batch)


def test_default_label_names(tmp_path: Path) -> None:
    args = make_arguments(tmp_path)
    assert Trainer(Net(), args).label_names == ["labels"]
    assert Trainer(Scored(), args).label_names == ["start_label", "end_labels"]
    assert Trainer(ToyForQuestionAnswering(), args).label_names == ["start_positions", "end_positions"]
    assert Trainer(Open(), args).label_names == ["labels"]
    assert Trainer(Open(), make_arguments(tmp_path, label_names=["target"])).label_names == ["target"]


@pytest.mark.parametrize(
    ("metric", "is_greater"), [("loss", False), ("eval_loss", False), ("eval_data1_loss", False), ("accuracy", True)]
)
def test_default_direction_of_a_metric(metric: str, is_greater: bool) -> None:
    assert TrainingArguments("out", metric_for_best_model=metric).greater_is_better is is_greater


def test_first_step_is_logged_and_not_evaluated(tmp_path: Path) -> None:
    trainer = train(
        tmp_path, max_steps=4, logging_steps=3, logging_first_step=True, eval_strategy="steps", eval_steps=2
    )
    history = trainer.state.log_history
    assert [entry["step"] for entry in history if "loss" in entry] == [1, 3]
    assert [entry["step"] for entry in history if "eval_loss" in entry] == [2, 4]


@pytest.mark.parametrize("rows", [make_rows(8), Stream(make_rows(8))])
def test_data_that_ends_before_max_steps_is_read_again(tmp_path: Path, rows: Any) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path, max_steps=7), train_dataset=rows)
    assert trainer.train().global_step == 7


def test_signature_rules_the_defaults_of_set_logging() -> None:
    args = TrainingArguments("out", report_to="none").set_logging()
    assert (args.logging_nan_inf_filter, args.log_on_each_node, args.report_to) == (False, False, [])


def test_no_delay_is_zero() -> None:
    assert TrainingArguments("out").set_evaluate(strategy="steps", delay=None).eval_delay == 0


def test_predictions_are_prefixed_test(tmp_path: Path) -> None:
    assert inspect.signature(Trainer.predict).parameters["metric_key_prefix"].default == "test"
    assert "test_loss" in Trainer(Net(), make_arguments(tmp_path)).predict(make_rows(3)).metrics


@pytest.mark.parametrize("value", ["", False, None, []])
def test_sharding_of_fairscale_that_is_off(value: Any) -> None:
    assert TrainingArguments("out", sharded_ddp=value) == TrainingArguments("out")


def test_rotation_goes_by_what_this_run_committed(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "overwrite_output_dir": True}
    train(tmp_path, max_steps=3, save_steps=3, **saving)
    train(tmp_path, max_steps=9, save_steps=9, **saving)
    train(tmp_path, max_steps=4, save_steps=1, save_total_limit=2, **saving)
    # checkpoint-9 has the largest number and is older; it belongs to another run, so it is not counted.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-3",
        "checkpoint-4",
        "checkpoint-9",
        "journal.jsonl",
    ]


@pytest.mark.parametrize("backend", ["auto", "cpu_amp"])
def test_backends_of_half_precision_of_both_versions(tmp_path: Path, backend: str) -> None:
    trainer = Trainer(Net(), make_arguments(tmp_path, bf16=True, half_precision_backend=backend))
    assert trainer.precision.policy.name == "bf16"
    assert TrainingArguments("out", half_precision_backend="cuda_amp").half_precision_backend == "cuda_amp"
    with pytest.raises(ConfigError, match="It is that of 'cuda'"):
        Trainer(Net(), make_arguments(tmp_path, bf16=True, use_cpu=True, half_precision_backend="cuda_amp"))


@pytest.mark.parametrize("alpha", [0.1, 5, 15])
def test_any_noise_is_taken(alpha: float) -> None:
    assert TrainingArguments("out", neftune_noise_alpha=alpha).neftune_noise_alpha == alpha


def test_settings_are_not_exported_as_variables(tmp_path: Path) -> None:
    """Elsewhere `bf16` and `torch_compile` are exported as ACCELERATE_*; here the Trainer hands them on itself."""
    before = dict(os.environ)
    trainer = train(tmp_path, bf16=True, max_steps=1)
    TrainingArguments("out", torch_compile=True, torch_compile_mode="default")
    assert trainer.precision.policy.name == "bf16"
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["compare_trainer_and_checkpoint_args", "_inner_training_loop"])
def test_hook_that_the_loop_does_not_call_is_refused(tmp_path: Path, name: str) -> None:
    kind = type("Mine", (Trainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(ConfigError, match=f"Mine defines {name}"):
        kind(Net(), make_arguments(tmp_path))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_size_by_its_old_name_counts_unless_the_new_one_says_otherwise(kind: str) -> None:
    old, new = f"per_gpu_{kind}_batch_size", f"per_device_{kind}_batch_size"
    with pytest.warns(FutureWarning, match=f"{old} is deprecated"):
        args = TrainingArguments("out", **{old: 3})
    assert getattr(args, f"{kind}_batch_size") == getattr(args, new) == 3
    assert getattr(TrainingArguments("out", **{old: 3, new: 3}), new) == 3
    with pytest.raises(ConfigError, match=rf"{old}=3.*{new}=5"):
        TrainingArguments("out", **{old: 3, new: 5})


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


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("precision", [{}, {"bf16": True}])
def test_offload_and_auto_wrap_of_fairscale_work_in_every_precision(precision: dict[str, bool]) -> None:
    args = TrainingArguments("out", use_cpu=True, sharded_ddp="zero_dp_2 offload auto_wrap", **precision)
    assert [str(word) for word in args.fsdp] == ["shard_grad_op", "offload", "auto_wrap"]
