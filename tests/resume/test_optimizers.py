"""Every documented optimizer trains, and a run that is stopped and resumed equals one that never was, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.optimizer_runs import make_run, weights_of
from support.resuming import StopAt

from hftrain.arguments.enums import OptimizerNames

OF_TORCH = ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop", "adamw_anyprecision", "muon"]
# They are refused on a CPU, see tests/unit/optim/extras.
ELSEWHERE = {
    *("adalomo", "adamw_apex_fused", "adamw_torch_npu_fused", "adamw_torch_xla"),
    *("galore_adamw_8bit", "galore_adamw_8bit_layerwise"),
}
OF_PACKAGES = sorted({*map(str, OptimizerNames)} - {*OF_TORCH} - ELSEWHERE)


class Wrapped(torch.optim.Optimizer):
    """A second copy of the weights around an optimizer, as public code wraps one: torch's __init__ never runs."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, {}  # type: ignore[assignment]
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        for slow, fast in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
            fast.copy_(slow.lerp_(fast, 0.5))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"fast": self.inner.state_dict(), "slow": self.slow}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["fast"])
        self.param_groups, self.slow = self.inner.param_groups, state["slow"]


def check(tmp_path: Path, optim: str, dtype: torch.dtype = torch.float32, *, is_wrapped: bool = False) -> None:
    runs = [make_run(tmp_path / folder, optim, *stop) for folder, *stop in (("whole",), ("cut", StopAt(2)), ("cut",))]
    for trainer in runs:
        trainer.model.to(dtype)
        if is_wrapped:
            trainer.optimizer = Wrapped(trainer.create_optimizer())
    whole, cut, resumed = runs
    before = weights_of(whole)
    whole.train()
    cut.train()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    ours, theirs = weights_of(resumed), weights_of(whole)
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
    if optim != "schedule_free_radam":  # whose first steps only gather statistics
        assert [name for name in theirs if torch.equal(before[name], theirs[name])] == []
    rates = [entry["learning_rate"] for entry in whole.state.log_history if "learning_rate" in entry]
    is_constant = optim.startswith("schedule_free")
    assert rates == pytest.approx([1e-2] * 4 if is_constant else [1e-2, 0.75e-2, 0.5e-2, 0.25e-2])


# Adafactor keeps averages in float32 beside 16-bit weights.
@pytest.mark.parametrize(
    "options",
    [*zip(OF_TORCH), pytest.param(("adafactor", torch.bfloat16), marks=pytest.mark.interop)],
    ids=lambda options: options[0],
)
def test_optimizer_of_torch_resumes_exactly(tmp_path: Path, options: tuple[Any, ...]) -> None:
    check(tmp_path, *options)


def test_optimizer_that_wraps_another_in_a_format_of_its_own_resumes_exactly(tmp_path: Path) -> None:
    check(tmp_path, "adamw_torch", is_wrapped=True)


@pytest.mark.optimizers
@pytest.mark.filterwarnings(r"ignore:.*invalid escape sequence")  # in torchao's own files
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU:UserWarning")
@pytest.mark.parametrize("optim", OF_PACKAGES)
def test_optimizer_of_a_package_resumes_exactly(tmp_path: Path, optim: str) -> None:
    # torchao compiles its update for each shape, which takes a minute; test_torchao has it compile one.
    with torch.compiler.set_stance("force_eager"):
        check(tmp_path, optim)


FORMS = ["", "fused=False", "foreach=True"]


@pytest.mark.parametrize("optim", ["adamw_torch", "adagrad"])
@pytest.mark.parametrize(("first", "then"), [(a, b) for a in FORMS for b in FORMS if a != b])
def test_run_goes_on_with_another_of_torchs_implementations(tmp_path: Path, optim: str, first: str, then: str) -> None:
    """The run's own choice counts, not the checkpoint's, and the result differs by rounding only."""
    whole = make_run(tmp_path / "whole", optim, optim_args=first)
    whole.train()
    make_run(tmp_path / "cut", optim, StopAt(2), optim_args=first).train()
    resumed, fresh = (make_run(tmp_path / name, optim, StopAt(4), optim_args=then) for name in ("cut", "fresh"))
    resumed.train(resume_from_checkpoint=True)
    fresh.train()
    for ours, theirs in zip(resumed.optimizer.param_groups, fresh.optimizer.param_groups, strict=True):
        assert [ours[name] for name in ("fused", "foreach")] == [theirs[name] for name in ("fused", "foreach")]
    for name, weights in weights_of(whole).items():
        torch.testing.assert_close(weights_of(resumed)[name], weights, rtol=1e-4, atol=1e-5)
    assert {float(state["step"]) for state in resumed.optimizer.state.values()} == {4.0}
