"""Which strategy, with which options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import Net, Task, make_arguments

from hftrain import ConfigError, Trainer
from hftrain.adapter.strategy import strategy_request
from hftrain.strategies.ddp import DDPStrategy
from hftrain.strategies.registry import strategies
from hftrain.strategies.single import SingleDeviceStrategy

ALWAYS = {"use_cpu": True, "place_model": True}


class Mine(SingleDeviceStrategy):
    """A strategy that no registry knows."""

    name = "mine"


def request(folder: Path, strategy: Any = None, *, is_checkpointing: bool = False, **options: Any) -> Any:
    return strategy_request(make_arguments(folder, **options), strategy, is_checkpointing=is_checkpointing)


@pytest.mark.parametrize(
    ("strategy", "is_checkpointing", "options", "expected"),
    [
        (None, False, {}, {"find_unused_parameters": True}),
        (None, True, {}, {"find_unused_parameters": False, "broadcast_buffers": False}),
        ("ddp", False, {}, {}),
        ("ddp", True, {}, {"broadcast_buffers": False}),
        (None, False, {"ddp_find_unused_parameters": False}, {"find_unused_parameters": False}),
        ("ddp", True, {"ddp_broadcast_buffers": True}, {"broadcast_buffers": True}),
        (
            "ddp",
            False,
            {"ddp_backend": "gloo", "ddp_bucket_cap_mb": 25, "ddp_timeout": 60},
            {"backend": "gloo", "bucket_cap_mb": 25, "timeout_s": 60},
        ),
        ("ddp_find_unused", False, {"ddp_find_unused_parameters": True}, {"find_unused_parameters": True}),
    ],
)
def test_options_of_ddp_follow_the_arguments_then_the_documented_defaults(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str | None,
    is_checkpointing: bool,
    options: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    _, found = request(tmp_path, strategy, is_checkpointing=is_checkpointing, **options)
    assert found == ALWAYS | expected


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [(None, {}, False), ("ddp_find_unused", {}, True), (None, {"ddp_find_unused_parameters": True}, True)],
)
def test_ddp_of_a_task_searches_for_unused_parameters_only_if_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str | None, options: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    trainer = Trainer(Task(), make_arguments(tmp_path, **options), strategy=strategy)
    assert ("find_unused_parameters=True" in repr(trainer.strategy)) is expected


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp"])
def test_fsdp_config_is_said_to_do_nothing_only_where_it_does_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, strategy: str | None
) -> None:
    _, options = request(tmp_path, strategy, fsdp_config={"min_num_params": 5})
    if strategy == "fsdp":
        assert options["min_num_params"] == 5
        assert not caplog.records
    else:
        assert "fsdp_config has no effect" in caplog.text


def test_argument_that_takes_back_a_preset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'ddp_find_unused' .* ddp_find_unused_parameters=False"):
        request(tmp_path, "ddp_find_unused", ddp_find_unused_parameters=False)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (DDPStrategy, r"It is a class\. Pass an object \(DDPStrategy\(\)\)"),
        ("", "neither a name"),
        ({"name": "ddp"}, "neither a name"),
    ],
)
def test_what_is_neither_a_name_nor_an_object_is_refused(tmp_path: Path, strategy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request(tmp_path, strategy)


def test_factory_with_open_options_gets_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "_entries", dict(strategies._entries))
    strategies.register("open", lambda **options: Mine(use_cpu=options["use_cpu"]))
    assert request(tmp_path, "open", ddp_backend="gloo") == ("open", {**ALWAYS, "backend": "gloo"})
    assert isinstance(Trainer(Net(), make_arguments(tmp_path), strategy="open").strategy, Mine)
