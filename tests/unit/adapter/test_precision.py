"""Which precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.tiny import make_arguments

from hftrain import ConfigError
from hftrain.adapter.strategy import precision_request
from hftrain.precision.autocast import AutocastPrecision
from hftrain.precision.base import FullPrecision


@pytest.mark.parametrize(
    ("precision", "options", "expected"),
    [
        (None, {}, ("fp32", {})),
        (None, {"fp16": True}, ("fp16", {})),
        (None, {"bf16": True}, ("bf16", {})),
        (None, {"tf32": True}, ("tf32", {})),
        (None, {"tf32": False}, ("fp32", {"matmul": "highest"})),
        (None, {"bf16": True, "tf32": True}, ("bf16", {"matmul": "high"})),
        (None, {"fp16": True, "tf32": False}, ("fp16", {"matmul": "highest"})),
        ("bf16", {}, ("bf16", {})),
        ("bf16", {"bf16": True}, ("bf16", {})),
        ("tf32", {"tf32": True}, ("tf32", {})),
        ("fp32", {"tf32": True}, ("fp32", {"matmul": "high"})),
        (FullPrecision(), {}, ("fp32", {})),
        (FullPrecision(matmul="high"), {"tf32": True}, ("tf32", {})),
        (AutocastPrecision(matmul="highest"), {"bf16": True, "tf32": False}, ("bf16", {})),
    ],
)
def test_name_and_options(tmp_path: Path, precision: Any, options: dict[str, Any], expected: Any) -> None:
    assert precision_request(make_arguments(tmp_path, **options), precision) == expected


@pytest.mark.parametrize(
    ("precision", "options"),
    [
        ("bf16", {"fp16": True}),
        ("fp32", {"bf16": True}),
        ("tf32", {"fp16": True}),
        ("bf16_true", {"bf16": True}),
        ("fp16_true", {"fp16": True}),
        ("fp64", {"bf16": True}),
        ("tf32", {"tf32": False}),
        (FullPrecision(), {"fp16": True}),
        (FullPrecision(), {"tf32": True}),
        (FullPrecision(), {"tf32": False}),
        (FullPrecision(matmul="high"), {"tf32": False}),
        (AutocastPrecision(), {"bf16": True, "tf32": True}),
    ],
)
def test_keyword_that_contradicts_an_argument_is_refused(
    tmp_path: Path, precision: Any, options: dict[str, Any]
) -> None:
    name = precision if isinstance(precision, str) else precision.policy.name
    field, value = list(options.items())[-1]
    with pytest.raises(ConfigError, match=f"Cannot use precision='{name}' together with {field}={value}") as caught:
        precision_request(make_arguments(tmp_path, **options), precision)
    assert f"precision='{name}' together with {field}={value}" in str(caught.value)


@pytest.mark.parametrize(
    ("launched", "precision", "options", "name"),
    [
        ("bf16", None, {}, "bf16"),
        ("no", None, {}, "fp32"),
        ("no", None, {"bf16": True}, "bf16"),
        ("bf16", "bf16", {}, "bf16"),
        ("fp16", None, {"fp16": True}, "fp16"),
    ],
)
def test_launcher_decides_where_nobody_else_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launched: str,
    precision: str | None,
    options: dict[str, Any],
    name: str,
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launched)
    # What transformers.TrainingArguments sets in a process that nothing has launched.
    assert precision_request(make_arguments(tmp_path), None)[0] == "fp32"
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "False")
    assert precision_request(make_arguments(tmp_path, **options), precision)[0] == name


@pytest.mark.parametrize(
    ("precision", "options", "acting"),
    [(None, {"fp16": True}, "fp16=True"), ("fp32", {}, "precision='fp32'"), ("bf16_true", {}, "precision='bf16_true'")],
)
def test_launchers_precision_that_has_no_effect_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str | None, options: dict[str, Any], acting: str
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "False")
    with pytest.warns(UserWarning, match=f"ACCELERATE_MIXED_PRECISION='bf16'.*{acting} takes precedence"):
        name, _ = precision_request(make_arguments(tmp_path, **options), precision)
    assert name == (precision or "fp16")


@pytest.mark.parametrize("backend", ["cpu_amp", "cuda_amp"])
def test_backend_of_half_precision_without_any_warns(tmp_path: Path, backend: str) -> None:
    args = make_arguments(tmp_path, half_precision_backend=backend)
    with pytest.warns(UserWarning, match=f"{backend}' has no effect without fp16=True or bf16=True"):
        precision_request(args, None)
    precision_request(args, "bf16")


def test_level_of_apex_warns_that_it_has_no_effect(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="fp16_opt_level has no effect"):
        precision_request(make_arguments(tmp_path, fp16_opt_level="O2"), None)
