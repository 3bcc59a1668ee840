"""What a strategy cannot do of what the arguments ask for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny import make_arguments

from hftrain.core.errors import ConfigError
from hftrain.core.types import Owns
from hftrain.rules.strategy import check_local_rank, check_strategy
from hftrain.strategies.single import SingleDeviceStrategy


def make_strategy(**traits: Any) -> SingleDeviceStrategy:
    """Return a strategy of which some class attributes are others."""
    return type("Stand", (SingleDeviceStrategy,), {"name": "stand", **traits})(use_cpu=True)


PARTS = {"shards_model": True}
TWO = property(lambda self: 2, lambda self, value: None)
ON_CUDA = {"device_type": "cuda", "planned_device": torch.device("cuda")}
BEST = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}


@pytest.mark.parametrize(
    ("options", "traits", "message"),
    [
        (
            {"use_cpu": True},
            ON_CUDA,
            "Cannot use use_cpu=True together with strategy=Stand(...). The strategy takes",
        ),
        ({"half_precision_backend": "cpu_amp", "bf16": True, "use_cpu": False}, ON_CUDA, "It is that of 'cpu'"),
        ({"auto_find_batch_size": True}, {"owns": Owns.ACCUMULATION}, "strategy='stand'. Its engine counts the micro-"),
        ({"save_on_each_node": True}, PARTS, "Cannot use save_on_each_node=True with strategy='stand'."),
        ({"save_on_each_node": True, "folder": "memory://run"}, {}, "write the same files of the same store"),
        ({**BEST, "save_only_model": True}, PARTS, "load_best_model_at_end=True and strategy='stand'."),
        ({"auto_find_batch_size": True}, {**PARTS, "world_size": TWO}, "runs out of memory, the others wait for it"),
        ({"batch_eval_metrics": True}, PARTS, "Cannot use batch_eval_metrics=True with strategy='stand'."),
        ({"bf16_full_eval": True}, PARTS, "Cannot use bf16_full_eval=True with strategy='stand'."),
        ({"fp16_full_eval": True}, PARTS, "Cannot use fp16_full_eval=True with strategy='stand'."),
        ({"jit_mode_eval": True}, PARTS, "Cannot use jit_mode_eval=True with strategy='stand'."),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(
    tmp_path: Path, options: dict[str, Any], traits: dict[str, Any], message: str
) -> None:
    arguments = make_arguments(**{"folder": tmp_path, **options})
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_strategy(arguments, make_strategy(**traits), optimizers=(None, None))
    if traits is not ON_CUDA and "folder" not in options:
        check_strategy(arguments, make_strategy(), optimizers=(None, None))


@pytest.mark.parametrize(("given", "launched"), [(0, None), (1, "0")])
def test_local_rank_without_launcher_raises(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: int, launched: str | None
) -> None:
    set_local_rank(monkeypatch, launched)
    with pytest.raises(ConfigError, match="torchrun"):
        check_local_rank(make_arguments(tmp_path, local_rank=given))


@pytest.mark.parametrize(("given", "launched"), [(-1, None), (-1, "1"), (1, "1")])
def test_local_rank_that_the_launcher_confirms_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: int, launched: str | None
) -> None:
    set_local_rank(monkeypatch, launched)
    check_local_rank(make_arguments(tmp_path, local_rank=given))


def set_local_rank(monkeypatch: pytest.MonkeyPatch, launched: str | None) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if launched is not None:
        monkeypatch.setenv("LOCAL_RANK", launched)
        monkeypatch.setenv("WORLD_SIZE", "2")
