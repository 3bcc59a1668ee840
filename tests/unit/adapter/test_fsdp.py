"""`fsdp` and `fsdp_config` become options of the strategy, or are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, Task, make_arguments

from hftrain import ConfigError, Trainer
from hftrain.adapter.strategy import strategy_request
from hftrain.strategies import FSDPStrategy


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


def options(folder: Path, fsdp: Any = "full_shard", config: Any = None, **others: Any) -> dict[str, Any]:
    args = make_arguments(folder, fsdp=fsdp, fsdp_config=config, **others)
    name, found = strategy_request(args, None, is_checkpointing=False)
    assert name == "fsdp"
    return {key: value for key, value in found.items() if key not in ("use_cpu", "place_model")}


@pytest.mark.parametrize(
    ("fsdp", "sharding", "offload", "auto_wrap"),
    [
        (True, "full_shard", False, False),
        ("full_shard", "full_shard", False, False),
        ("full shard", "full_shard", False, False),
        ("full shard offload auto_wrap", "full_shard", True, True),
        ("shard_grad_op", "shard_grad_op", False, False),
        ("shard_grad_op offload", "shard_grad_op", True, False),
        ("shard_grad_op auto_wrap", "shard_grad_op", False, True),
        (["full_shard", "auto_wrap"], "full_shard", False, True),
        ("no_shard", "no_shard", False, False),
        ("hybrid_shard", "hybrid_shard", False, False),
        ("hybrid_shard_zero2 auto_wrap", "hybrid_shard_zero2", False, True),
        ("auto_wrap", "full_shard", False, True),
    ],
)
def test_words_say_how_a_model_is_split(
    tmp_path: Path, fsdp: Any, sharding: str, offload: bool, auto_wrap: bool
) -> None:
    assert options(tmp_path, fsdp) == {"sharding": sharding, "offload": offload, "auto_wrap": auto_wrap}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"min_num_params": 100}, {"min_num_params": 100, "auto_wrap": True}),
        ({"fsdp_transformer_layer_cls_to_wrap": "Block"}, {"layer_classes": ["Block"], "auto_wrap": True}),
        ({"transformer_layer_cls_to_wrap": "Block,Head"}, {"layer_classes": ["Block", "Head"], "auto_wrap": True}),
        ({"transformer_layer_cls_to_wrap": ["Block"]}, {"layer_classes": ["Block"], "auto_wrap": True}),
        ({"forward_prefetch": "true"}, {"forward_prefetch": True}),
        ({"sync_module_states": False}, {"sync_module_states": False}),
        ({"cpu_ram_efficient_loading": "True"}, {"cpu_ram_efficient_loading": True}),
        ({"activation_checkpointing": True}, {"activation_checkpointing": True}),
        ({"fsdp_state_dict_type": "full_state_dict"}, {"state_dict_type": "FULL_STATE_DICT"}),
        ({"reshard_after_forward": True, "fsdp_version": 2}, {"reshard_after_forward": True}),
        ({"backward_prefetch": "backward_pre", "limit_all_gathers": True, "use_orig_params": "true"}, {}),
        ({"xla": False, "xla_fsdp_grad_ckpt": "false", "min_num_params": None}, {}),
    ],
)
@pytest.mark.parametrize("is_file", [False, True])
def test_keys_become_options_from_a_dict_and_from_a_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], expected: dict[str, Any], is_file: bool
) -> None:
    given: Any = config
    if is_file:
        given = str(tmp_path / "fsdp.json")
        Path(given).write_text(json.dumps(config), encoding="utf-8")
    found = options(tmp_path, "full_shard", given)
    assert found == {"sharding": "full_shard", "offload": False, "auto_wrap": False, **expected}
    FSDPStrategy(use_cpu=True, **found)
    assert not caplog.records


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_older_arguments_become_keys(tmp_path: Path) -> None:
    assert options(tmp_path, fsdp_min_num_params=9)["min_num_params"] == 9
    assert options(tmp_path, fsdp_transformer_layer_cls_to_wrap="Block")["layer_classes"] == ["Block"]
    assert options(tmp_path, "", sharded_ddp="zero_dp_3 auto_wrap")["auto_wrap"] is True


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"min_num_param": 5}, "Did you mean 'min_num_params'"),
        ({"version": 3}, "two versions of FSDP"),
        ({"forward_prefetch": 3}, "must be true or false"),
        ({"min_num_params": "many"}, "number of parameters"),
        ({"min_num_params": -1}, "number of parameters"),
        ({"backward_prefetch": "backward_prae"}, "Did you mean 'backward_pre'"),
        ({"reshard_after_forward": False}, "agree with fsdp='full_shard'"),
        ({"reshard_after_forward": "yes"}, "true, false or a number"),
    ],
)
def test_key_that_cannot_be_is_refused_with_its_reason(tmp_path: Path, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        options(tmp_path, "full_shard", config)


@pytest.mark.filterwarnings("ignore:fsdp_config's xla_fsdp_")
def test_key_of_xla_without_xla_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="belongs to FSDP on XLA devices"):
        options(tmp_path, "full_shard", {"xla_fsdp_grad_ckpt": True})


def test_contradictions_are_found_in_a_file_too(tmp_path: Path) -> None:
    for config, others, reason in (
        ({"activation_checkpointing": True}, {"gradient_checkpointing": True}, "recomputes the same"),
        ({"min_num_params": 5, "transformer_layer_cls_to_wrap": "Block"}, {}, "two ways to choose"),
        ({"cpu_ram_efficient_loading": True, "sync_module_states": False}, {}, "sends out"),
    ):
        (tmp_path / "fsdp.json").write_text(json.dumps(config), encoding="utf-8")
        args = make_arguments(tmp_path, fsdp="shard_grad_op", fsdp_config=str(tmp_path / "fsdp.json"), **others)
        with pytest.raises(ConfigError, match=reason):
            Trainer(Net(), args)


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "Cannot read fsdp_config="), ("{", "Cannot read fsdp_config="), ("[1]", "a list")]
)
def test_file_that_is_no_json_object_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "fsdp.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        options(tmp_path, "full_shard", str(path))


@pytest.mark.parametrize(
    ("config", "unused"),
    [
        ({"version": 1}, ["version=1"]),
        (
            {"fsdp_version": "1", "backward_prefetch": "NO_PREFETCH"},
            ["version='1'", "backward_prefetch='NO_PREFETCH'"],
        ),
        ({"backward_prefetch": "backward_pos", "version": 2}, ["backward_prefetch='backward_pos'"]),
        ({"limit_all_gathers": False, "forward_prefetch": True}, ["limit_all_gathers=False"]),
        ({"use_orig_params": False}, ["use_orig_params=False"]),
    ],
)
@pytest.mark.parametrize("name", [None, "fsdp", "fsdp1", "fsdp_offload"])
def test_settings_of_the_older_wrapper_mean_this_one_and_are_named_in_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], unused: list[str], name: str | None
) -> None:
    args = make_arguments(tmp_path, fsdp="shard_grad_op offload", fsdp_config=config)
    trainer = Trainer(Net(), args, strategy=name)
    strategy = trainer.strategy
    assert type(strategy) is FSDPStrategy
    assert (strategy.name, strategy.sharding, strategy.offload) == ("fsdp", "shard_grad_op", True)
    assert trainer.is_fsdp_enabled
    (told,) = caplog.messages
    named = ["strategy='fsdp1'"] if name == "fsdp1" else []
    named += [f"fsdp_config's {each}" for each in unused]
    assert f"have no effect: {', '.join(named)}." in told


def test_one_process_without_a_launcher_is_refused_unless_the_strategy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ConfigError, match="no launcher started"):
        options(tmp_path)
    assert Trainer(Net(), make_arguments(tmp_path), strategy="fsdp").strategy.world_size == 1


def test_generation_is_refused(tmp_path: Path) -> None:
    args = make_arguments(tmp_path)
    args.predict_with_generate = True
    with pytest.raises(ConfigError, match="predict_with_generate=True"):
        Trainer(Net(), args, strategy="fsdp")


def test_fsdp_is_told_from_other_strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Trainer(Net(), make_arguments(tmp_path, fsdp="full_shard")).is_fsdp_enabled
    assert not Trainer(Task(), make_arguments(tmp_path), strategy="ddp").is_fsdp_enabled


# What `accelerate launch` sets for the documented example file.
LAUNCHER = {
    "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "1",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block",
    "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, {"sharding": "hybrid_shard"}),
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, {"sharding": "shard_grad_op"}),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, {"offload": True}),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, {"min_num_params": 100_000_000, "layer_classes": None}),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": ""}, {"auto_wrap": False}),
    ],
)
def test_launchers_settings_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], expected: dict[str, Any]
) -> None:
    for name, value in {**LAUNCHER, **changed}.items():
        monkeypatch.setenv(name, value)
    whole = {
        "sharding": "full_shard", "offload": False, "auto_wrap": True, "layer_classes": ["Block"],
        "state_dict_type": "FULL_STATE_DICT", "forward_prefetch": False, "cpu_ram_efficient_loading": True,
        "sync_module_states": True, "activation_checkpointing": False, **expected,
    }  # fmt: skip
    found = options(tmp_path, "")
    assert (
        {"layer_classes": None, **found} == whole if expected.get("auto_wrap") is not False else not found["auto_wrap"]
    )
    # What the arguments say replaces it.
    assert options(tmp_path, "no_shard") == {"sharding": "no_shard", "offload": False, "auto_wrap": False}
