"""What `strategies/deepspeed` reads of DeepSpeed without a public way is in the installed version, or fails here."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from arch.test_foreign import FOREIGN

from hftrain.strategies.deepspeed import states

pytestmark = pytest.mark.deepspeed

# Each name, and the file of deepspeed/runtime that has it. The first are the float32 tensors of each optimizer.
MASTERS = {
    "fp32_partitioned_groups_flat": "zero/stage3.py",
    "single_partition_of_fp32_groups": "zero/stage_1_and_2.py",
    "fp32_groups_flat_partition": "bf16_optimizer.py",
    "fp32_groups_flat": "fp16/fused_optimizer.py",
    "fp32_groups": "fp16/unfused_optimizer.py",
}
PLACES = {
    **MASTERS,
    **dict.fromkeys(sorted(FOREIGN["strategies/deepspeed/states.py"]), "zero/stage3.py"),
    **dict.fromkeys(states._COUNTERS, "engine.py"),
    **dict.fromkeys(states._SCALE, "fp16/loss_scaler.py"),
    "round_robin_gradients": "zero/stage_1_and_2.py",
    "swap_optimizer": "zero/stage3.py",
}


def test_every_place_of_float32_tensors_is_listed() -> None:
    assert MASTERS.keys() == set(states._MASTERS)


@pytest.mark.parametrize("name", PLACES)
def test_private_name_is_there(name: str) -> None:
    package = find_spec("deepspeed")  # imported, it would change the environment
    assert package is not None
    assert package.origin is not None
    source = (Path(package.origin).parent / "runtime" / PLACES[name]).read_text("utf-8")
    assert f"self.{name} = " in source or f"def {name}(" in source, f"DeepSpeed {version('deepspeed')} has no {name}"
