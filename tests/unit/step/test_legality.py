"""Which pairs work, and that the others are refused with their reason before anything is launched."""

from __future__ import annotations

import pytest
import torch

from hftrain.core.errors import ConfigError
from hftrain.core.types import PrecisionPolicy
from hftrain.precision.registry import precisions
from hftrain.step.legality import check_legal, find_device_refusal, legality_table
from hftrain.strategies.base import Strategy
from hftrain.strategies.registry import create_strategy, strategies


class Picky(Strategy):
    """A third party's strategy that cannot do float16."""

    name = "picky"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    @classmethod
    def refuses(cls, policy: PrecisionPolicy, device_type: str) -> str | None:
        return "its engine has no float16" if policy.compute_dtype == torch.float16 else None


@pytest.mark.parametrize(
    ("precision", "device_type", "capability", "reason"),
    [
        ("fp32", "cpu", None, None),
        ("bf16", "cpu", None, None),
        ("fp16", "cpu", None, None),
        ("tf32", "cpu", None, "CUDA devices only"),
        ("tf32", "mps", None, "CUDA devices only"),
        ("tf32", "cuda", (7, 5), "and this one has 7.5"),
        ("tf32", "cuda", (8, 0), None),
        ("bf16", "cuda", (7, 0), "'fp16' works"),
        ("bf16", "cuda", (9, 0), None),
        ("fp16", "cuda", (7, 0), None),
        ("bf16", "mps", None, None),
        ("fp16", "mps", None, None),
        ("fp32", "xpu", None, None),
    ],
)
def test_device_refuses_what_it_cannot_run(
    precision: str, device_type: str, capability: tuple[int, int] | None, reason: str | None
) -> None:
    found = find_device_refusal(precisions.create(precision).policy, device_type, capability)
    assert found is None if reason is None else reason in str(found)


def test_illegal_pair_is_refused_before_launch() -> None:
    strategy = create_strategy("single", use_cpu=True)
    with pytest.raises(ConfigError, match=r"precision='tf32' .* strategy='single' on 'cpu'. TF32 exists on CUDA"):
        check_legal(strategy, precisions.create("tf32"))
    with pytest.raises(ConfigError, match="TF32 exists"):
        check_legal(strategy, precisions.create("bf16", matmul="high"))
    check_legal(strategy, precisions.create("bf16", matmul="highest"))


def test_third_party_strategy_is_legal_unless_it_says_otherwise() -> None:
    check_legal(Picky(), precisions.create("bf16"))
    with pytest.raises(ConfigError, match="its engine has no float16"):
        check_legal(Picky(), precisions.create("fp16"))


@pytest.mark.parametrize("target", [Picky, lambda: Picky()])
def test_table_holds_every_pair_on_every_device(target: object) -> None:
    strategies.register("picky", target)
    try:
        rows = legality_table()
    finally:
        del strategies._entries["picky"]
    names, numerics, devices = ({row[index] for row in rows} for index in range(3))
    assert {"single", "ddp", "ddp_find_unused", "picky"} <= names
    assert numerics >= {"fp32", "tf32", "bf16", "fp16"}
    assert devices == {"cpu", "cuda 7.5", "cuda 8.0", "mps"}
    assert len(rows) == len(set(rows)) == len(names) * len(numerics) * len(devices)
    reasons = {row[:3]: row.reason for row in rows}
    assert reasons["single", "fp16", "cpu"] is None
    assert "process group" in reasons["ddp", "fp32", "mps"]
    # A factory cannot be asked before it is called, so it counts as legal until then.
    assert reasons["picky", "fp16", "cpu"] == ((target is Picky and "its engine has no float16") or None)
