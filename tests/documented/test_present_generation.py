"""What newer versions than the documented ones have: it acts, or it is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.hub_server import running_hub
from support.tiny import Net, at, make_arguments, make_rows, make_trainer

from hftrain import ConfigError, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainerControl
from hftrain.strategies.ddp import DDPStrategy

make = partial(make_trainer, eval_dataset=make_rows(5))


def test_activation_checkpointing_is_gradient_checkpointing(tmp_path: Path) -> None:
    kwargs = '{"use_reentrant": false}'
    new = make_arguments(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs=kwargs)
    old = make_arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
    for args in (new, old):
        assert args.gradient_checkpointing is args.activation_checkpointing is True
        assert args.gradient_checkpointing_kwargs == args.activation_checkpointing_kwargs == {"use_reentrant": False}
    off = replace(old, activation_checkpointing=False, activation_checkpointing_kwargs={})
    assert not off.gradient_checkpointing
    old.gradient_checkpointing = False
    assert old.activation_checkpointing is False
    assert make_arguments(tmp_path).activation_checkpointing is False


@pytest.mark.parametrize("use_cache", [True, False, None])
def test_use_cache_is_set_in_the_models_config(tmp_path: Path, use_cache: bool | None) -> None:
    model = Net()
    model.config = SimpleNamespace(use_cache="as it was")
    model.generation_config = SimpleNamespace(use_cache="as it was")
    make(tmp_path, model, use_cache=use_cache)
    expected = "as it was" if use_cache is None else use_cache
    assert (model.config.use_cache, model.generation_config.use_cache) == (expected, expected)


def test_use_cache_without_a_config_warns(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="use_cache=False has no effect"):
        make(tmp_path, use_cache=False)


def order(trainer: Trainer) -> list[float]:
    return [float(row[0]) for batch in trainer.get_train_dataloader() for row in batch["x"]]


def test_sampling_strategy_chooses_the_order(tmp_path: Path) -> None:
    rows = [float(row["x"][0]) for row in make_rows()]
    assert order(make(tmp_path, train_sampling_strategy="sequential")) == rows
    found = order(make(tmp_path))
    assert found != rows
    assert sorted(found) == sorted(rows)


class CallsSuper(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return super()._get_train_sampler(train_dataset)


def test_sequential_sampling_reaches_an_override(tmp_path: Path) -> None:
    args = make_arguments(tmp_path, train_sampling_strategy="sequential")
    assert order(CallsSuper(Net(), args, train_dataset=make_rows())) == [float(row["x"][0]) for row in make_rows()]


def test_sampling_by_length_is_group_by_length(tmp_path: Path) -> None:
    rows = [{"input_ids": [1] * length, "labels": 0} for length in range(1, 41)]
    found = []
    for options in ({"train_sampling_strategy": "group_by_length"}, {"group_by_length": True}):
        trainer = Trainer(Net(), make_arguments(tmp_path, **options), train_dataset=rows)
        found.append(list(trainer._get_train_sampler()))
    assert found[0] == found[1]
    assert found[0][0] == 39


def test_run_of_another_order_is_not_continued_in_the_middle(tmp_path: Path) -> None:
    make(tmp_path, max_steps=3, save_strategy="steps", save_steps=3).train()
    other = make(tmp_path, train_sampling_strategy="sequential", max_steps=5)
    with pytest.raises(Exception, match="grouping"):
        other.train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataloader_in_order": False}, "so a resume could not find"),
        ({"train_sampling_strategy": "batch_rebalance"}, "unequal sizes"),
        ({"train_sampling_strategy": "sequential", "group_by_length": True}, "order of the training data"),
        ({"train_sampling_strategy": "sequentiel"}, "Did you mean 'sequential'"),
        ({"dataloader_multiprocessing_context": "spawn"}, "there are none"),
        ({"dataloader_multiprocessing_context": "thread", "dataloader_num_workers": 1}, "no such value"),
    ],
)
def test_what_cannot_act_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_arguments(tmp_path, **options)


def test_sortish_sampling_with_another_order_is_refused(tmp_path: Path) -> None:
    args = Seq2SeqTrainingArguments(
        str(tmp_path), sortish_sampler=True, train_sampling_strategy="sequential", use_cpu=True, report_to="none"
    )
    with pytest.raises(ConfigError, match="'sequential' together with sortish_sampler=True"):
        Seq2SeqTrainer(Net(), args, train_dataset=make_rows()).get_train_dataloader()


def test_workers_start_as_asked(tmp_path: Path) -> None:
    options = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "forkserver"}
    trainer = make(tmp_path, **options)
    for loader in (trainer.get_train_dataloader(), trainer.get_eval_dataloader()):
        assert loader.multiprocessing_context.get_start_method() == "forkserver"
    trainer.train_dataset = [lambda: None]
    trainer.data_collator = lambda rows: rows
    with pytest.raises(ConfigError, match="started by 'forkserver'"):
        trainer.train()


def test_static_graph_reaches_ddp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    strategy = make(tmp_path, ddp_static_graph=True).strategy
    assert isinstance(strategy, DDPStrategy)
    assert strategy._options["static_graph"] is True


def test_jit_checkpoint_is_what_every_run_does(tmp_path: Path) -> None:
    assert make(tmp_path, enable_jit_checkpoint=True, max_steps=1).train().global_step == 1


def test_sizes_of_a_split_sequence_are_one(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert (trainer.get_cp_size(), trainer.get_sp_size()) == (1, 1)


def test_model_that_was_sharded_when_it_was_loaded_is_refused(tmp_path: Path) -> None:
    model = Net()
    model.is_distributed_loading_by_transformers = True
    with pytest.raises(ConfigError, match="strategy='fsdp'"):
        make(tmp_path, model)


def test_control_is_built_from_its_state() -> None:
    control = TrainerControl(should_log=True)
    assert vars(TrainerControl.from_state(control.state())) == vars(control)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_push_is_heard_before_the_card_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []
    look = at("on_push_begin", lambda args, state, control, **kwargs: heard.append((tmp_path / "README.md").exists()))
    trainer = make(tmp_path)
    trainer.add_callback(look)
    with running_hub(monkeypatch):
        trainer.push_to_hub(private=True)
    assert heard == [False]
    assert (tmp_path / "README.md").exists()
