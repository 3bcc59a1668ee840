from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from hftrain.adapter.unwired import UNWIRED, check_local_rank, check_wired
from hftrain.arguments import Seq2SeqTrainingArguments, TrainingArguments
from hftrain.core.errors import ConfigError

CHANGED = {
    "logging_dir": "logs",
    "project": "mine",
    "trackio_space_id": None,
    "optim_target_modules": "all-linear",
    "save_on_each_node": True,
    "mp_parameters": "{}",
    "deepspeed": "ds.json",
    "parallelism_config": object(),
    "ray_scope": "all",
    "predict_with_generate": True,
    "generation_max_length": 5,
    "generation_num_beams": 2,
    "generation_config": "folder",
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)


def test_listed_settings_exist():
    assert set(UNWIRED) <= {field.name for field in dataclasses.fields(Seq2SeqTrainingArguments)}


@pytest.mark.parametrize("cls", [TrainingArguments, Seq2SeqTrainingArguments])
def test_defaults_pass(cls):
    check_wired(cls("out"))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", sorted(UNWIRED))
def test_changed_setting_raises(name):
    args = Seq2SeqTrainingArguments("out", **{name: CHANGED[name]})
    with pytest.raises(ConfigError, match=r"Not wired in this version: .*set it to its default") as caught:
        check_wired(args)
    assert UNWIRED[name] in str(caught.value)
    assert "secret" not in str(caught.value)


def test_all_changed_settings_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        check_wired(Seq2SeqTrainingArguments("out", save_on_each_node=True, ray_scope="all", mp_parameters="{}"))
    for shown in ("save_on_each_node=True", "ray_scope='all'", "mp_parameters='{}'"):
        assert shown in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"half_precision_backend": "cuda_amp"},
        {"half_precision_backend": "cpu_amp"},
        {"report_to": "none"},
        {"accelerator_config": {"split_batches": True, "even_batches": False, "use_seedable_sampler": False}},
        {"accelerator_config": {"dispatch_batches": None}},
        {"accelerator_config": {"dispatch_batches": False, "non_blocking": False}},
    ],
)
def test_wired_values_pass(given):
    check_wired(TrainingArguments("out", **given))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"report_to": "all"}, "report_to"),
    ],
)
def test_value_that_is_not_wired_raises(given, shown):
    with pytest.raises(ConfigError, match=shown):
        check_wired(TrainingArguments("out", **given))


def test_fields_of_a_subclass_are_its_own():
    @dataclass
    class Own(TrainingArguments):
        extra: int = 3

    check_wired(Own("out", extra=4))


@pytest.mark.parametrize(("given", "launched"), [(0, None), (1, "0")])
def test_local_rank_without_launcher_raises(monkeypatch, given, launched):
    if launched is not None:
        monkeypatch.setenv("LOCAL_RANK", launched)
    with pytest.raises(ConfigError, match="torchrun"):
        check_local_rank(TrainingArguments("out", local_rank=given))


@pytest.mark.parametrize(("given", "launched"), [(-1, None), (-1, "1"), (1, "1")])
def test_local_rank_that_the_launcher_confirms_passes(monkeypatch, given, launched):
    if launched is not None:
        monkeypatch.setenv("LOCAL_RANK", launched)
    check_local_rank(TrainingArguments("out", local_rank=given))
