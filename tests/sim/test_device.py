"""The simulated accelerator keeps its own promises; without them, the tests beside this one prove nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.sim

TOUCHING = """
import ctypes, faulthandler
import torch
from support.torch_sim import load
faulthandler.enable()
load()
ctypes.string_at(torch.ones(4, device="sim").data_ptr(), 4)
"""

FORKING = """
import os
import torch
from support.torch_sim import load
load()
kept = torch.ones(4, device="sim")
if os.fork():
    os.wait()
    print("parent", kept.tolist())
else:
    try:
        kept + 1
    except RuntimeError as error:
        print(error, flush=True)
    del kept
    os._exit(0)
"""


def in_a_process(script: str) -> subprocess.CompletedProcess[str]:
    tests = Path(__file__).parents[1]
    return subprocess.run([sys.executable, "-c", script], cwd=tests, capture_output=True, text=True, check=False)


def test_the_host_cannot_touch_its_memory() -> None:
    ended = in_a_process(TOUCHING)
    assert ended.returncode < 0
    assert "Segmentation fault" in ended.stderr
    assert "string_at" in ended.stderr


def test_a_forked_process_is_refused() -> None:
    told = in_a_process(FORKING).stdout
    assert "Cannot re-initialize SIM in forked subprocess" in told
    assert "parent [1.0, 1.0, 1.0, 1.0]" in told


def test_memory_that_was_not_written_reads_as_nan() -> None:
    assert torch.empty(100, device="sim").isnan().all()
    freed = torch.ones(1000, device="sim")
    address = freed.data_ptr()
    del freed
    again = torch.empty(1000, device="sim")
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_views_share_their_memory() -> None:
    whole = torch.zeros(3, 4, device="sim")
    whole.view(4, 3).t()[1, 2:].fill_(1)
    whole[0].add_(2)
    expected = torch.zeros(3, 4)
    expected.view(4, 3).t()[1, 2:].fill_(1)
    expected[0].add_(2)
    assert torch.equal(whole.cpu(), expected)
    assert torch.tensor([1 + 2j], device="sim").conj().cpu().item() == 1 - 2j


@pytest.mark.parametrize("other", ["cpu", "sim:1"])
def test_devices_are_not_mixed(other: str) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device, but found at least two dev"):
        torch.ones(2, device="sim") + torch.ones(2, device=other)


def test_a_number_on_the_cpu_may_be_mixed_in() -> None:
    assert (torch.ones(2, device="sim") + torch.tensor(1.0)).tolist() == [2.0, 2.0]


def test_outputs_are_resized() -> None:
    found = torch.empty(0, device="sim")
    torch.add(torch.ones(5, device="sim"), 1, out=found)
    assert found.tolist() == [2.0] * 5


def test_it_trains_like_the_cpu() -> None:
    def trained(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.GELU(), nn.Flatten(), nn.Linear(16, 1))
        x = torch.randn(5, 2, 6).to(device)
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        for _ in range(3):
            model(x).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        return [value.cpu() for value in model.state_dict().values()]

    for one, other in zip(trained("cpu"), trained("sim"), strict=True):
        assert torch.equal(one, other)


def test_each_device_has_its_own_random_numbers() -> None:
    torch.manual_seed(3)
    host = torch.rand(3)
    first, second = (torch.rand(3, device=f"sim:{index}") for index in range(2))
    assert torch.equal(host, first.cpu())
    assert torch.equal(first.cpu(), second.cpu())
    state = torch.sim.get_rng_state()  # type: ignore[attr-defined]
    before = nn.functional.dropout(torch.ones(99, device="sim"))
    torch.sim.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(nn.functional.dropout(torch.ones(99, device="sim")), before)


def test_autocast_has_the_lists_of_a_gpu() -> None:
    x = torch.ones(2, 4, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        y = nn.Linear(4, 4, device="sim")(x)
        assert y.dtype == torch.bfloat16
        assert nn.functional.layer_norm(y, (4,)).dtype == torch.float32
        assert y.softmax(-1).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe to autocast"):
            nn.functional.binary_cross_entropy(y.sigmoid(), y)


def test_a_scaler_finds_an_overflow() -> None:
    weight = nn.Parameter(torch.ones(2, device="sim"))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("sim", init_scale=4.0)
    for factor, scale, value in ((1.0, 4.0, 0.0), (float("inf"), 2.0, 0.0)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale
        assert weight.tolist() == [value] * 2


def test_memory_is_counted_and_limited(sim: Any) -> None:
    before = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    kept = torch.empty(1000, device="sim")
    assert sim.memory_allocated() == before + 4096
    del kept
    assert sim.memory_allocated() == before
    assert sim.max_memory_allocated() == before + 4096
    with sim.memory_limit(before + 1000), pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        torch.empty(1000, device="sim")


def test_waits_are_counted_with_their_places(sim: Any) -> None:
    x = torch.arange(6.0, device="sim")
    pinned = torch.ones(6).pin_memory()
    with sim.record_syncs() as waits:
        (x + 1).sum()
        pinned.to("sim", non_blocking=True)
        x.to("cpu", non_blocking=True)
    assert waits == []
    with sim.record_syncs() as waits:
        x.sum().item()
        x.cpu()
        torch.ones(3).to("sim", non_blocking=True)
        x[x > 1]
        x.masked_select(x > 2)
        torch.accelerator.synchronize()
    kinds = ["item", "blocking copy", "pageable copy", "data-dependent", "data-dependent", "explicit"]
    assert [wait.kind for wait in waits] == kinds
    assert "x.sum().item()" in str(waits[0])


def test_copies_are_late(sim: Any) -> None:
    pinned = torch.zeros(3).pin_memory()
    pinned.copy_(torch.ones(3, device="sim"), non_blocking=True)
    event = torch.Event("sim")
    event.record()
    assert pinned.tolist() == [0.0] * 3
    assert not event.query()
    event.synchronize()
    assert pinned.tolist() == [1.0] * 3
    with sim.late_copies(False):
        pinned.copy_(torch.zeros(3, device="sim"), non_blocking=True)
    assert pinned.tolist() == [0.0] * 3


def test_a_copy_on_another_stream_has_to_be_waited_for(sim: Any) -> None:
    side = sim.Stream()
    with sim.stream(side):
        moved = torch.ones(3).pin_memory().to("sim", non_blocking=True)
    assert (moved + 1).isnan().all()
    assert sim.forget_races() == 1
    sim.current_stream().wait_stream(side)
    assert (moved + 1).tolist() == [2.0] * 3


def kinds_of(races: list[Any]) -> list[str]:
    return [race.kind for race in races]


def wait(how: str, sim: Any, earlier: Any, later: Any) -> None:
    third = sim.Stream()
    if "third" in how:
        third.wait_stream(earlier)
    if how == "stream":
        later.wait_stream(earlier)
    elif how == "event":
        later.wait_event(earlier.record_event())
    elif how == "third stream":
        later.wait_stream(third)
    elif how == "host":
        earlier.synchronize()
    elif how == "host, for a third":
        third.synchronize()
    elif how == "device":
        sim.synchronize()


WAITS = ("stream", "event", "third stream", "host", "host, for a third", "device")


@pytest.mark.parametrize("how", ["not at all", *WAITS])
def test_a_stream_has_to_wait_for_what_it_reads_and_overwrites(sim: Any, how: str) -> None:
    main, side = sim.current_stream(), sim.Stream()
    x = torch.ones(3, device="sim")
    with sim.record_races() as races:
        wait(how, sim, main, side)
        with sim.stream(side):
            y = x[1:] * 2  # reads
        wait(how, sim, side, main)
        x.add_(y.sum() + 1)  # reads what the other has written, writes what it has read
    assert sim.forget_races() == len(races)
    if how in WAITS:
        assert races == []
    else:
        assert kinds_of(races) == ["read too early"] * 2
        assert "aten::sum" in races[1].what
        assert "x.add_(y.sum() + 1)" in str(races[1])


def test_a_stream_must_not_overwrite_too_early(sim: Any) -> None:
    main, side = sim.current_stream(), sim.Stream()
    x = torch.ones(3, device="sim")
    side.wait_stream(main)
    with sim.record_races() as races:
        with sim.stream(side):
            x * 2
        x.zero_()
        with sim.stream(side):
            x.fill_(1)
    assert kinds_of(races) == ["overwritten too early"] * 2
    assert sim.forget_races() == 2


def test_a_wait_that_is_missing_counts_once(sim: Any) -> None:
    several = [torch.ones(3, device="sim") for _ in range(3)]
    with sim.stream(sim.Stream()):
        for each in reversed(several):
            each * 2
    assert sim.forget_races() == 1


@pytest.mark.parametrize("care", ["none", "record_stream", "wait", "later wait"])
def test_memory_must_not_be_freed_while_another_stream_uses_it(sim: Any, care: str) -> None:
    main, side = sim.current_stream(), sim.Stream()
    x = torch.ones(1000, device="sim")
    side.wait_stream(main)
    with sim.record_races() as races:
        with sim.stream(side):
            x * 2
        if care == "record_stream":
            x.record_stream(side)
        if care == "wait":
            main.wait_stream(side)
        address = x.data_ptr()
        del x
        if care == "later wait":
            main.wait_stream(side)
        again = torch.zeros(1000, device="sim")
    assert (again.data_ptr() == address) == (care != "record_stream")
    assert kinds_of(races) == (["freed without record_stream"] if care == "none" else [])
    assert sim.forget_races() == len(races)


def test_memory_comes_back_when_the_recorded_stream_is_done(sim: Any) -> None:
    side = sim.Stream()
    x = torch.ones(100_000, device="sim")
    side.wait_stream(sim.current_stream())
    with sim.stream(side):
        x * 2
    x.record_stream(side)
    before = sim.memory_allocated()
    del x
    assert sim.memory_allocated() < before
    assert torch.sim.memory_stats()["active_bytes.all.current"] == before  # type: ignore[attr-defined]
    with sim.memory_limit(before):  # too little for both: the allocator waits
        torch.empty(100_000, device="sim")
    assert torch.sim.memory_stats()["active_bytes.all.current"] < before  # type: ignore[attr-defined]


def test_a_pinned_buffer_that_changes_too_early_is_noticed(sim: Any) -> None:
    pinned = torch.zeros(3).pin_memory()
    with sim.record_races() as races:
        moved = pinned.to("sim", non_blocking=True)
        pinned.fill_(5)
        assert moved.tolist() == [5.0] * 3  # as on a GPU, where nothing says it
    assert kinds_of(races) == ["pinned buffer"]
    assert sim.forget_races() == 1
    moved = pinned.to("sim", non_blocking=True)
    sim.synchronize()
    pinned.fill_(0)
    assert sim.num_races() == 0


def test_tied_weights_stay_tied(sim: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight

    model = Tied().to("sim")
    assert model.a.weight is model.b.weight
    with sim.strict_assignment():
        model = Tied().to("sim")
        assert model.a.weight is not model.b.weight
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            nn.Linear(2, 2).weight.data = torch.ones(2, 2, device="sim")


def test_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(3, device="sim:1")}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt")["x"].device == torch.device("sim:1")
    assert torch.load(tmp_path / "x.pt", map_location="cpu")["x"].tolist() == [0, 1, 2]
