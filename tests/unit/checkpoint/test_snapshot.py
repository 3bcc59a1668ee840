"""Copies in host memory: bit for bit, once each, in the same memory again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hftrain.core.types import Shard
from hftrain.extras.background import HostCopies


def pointers(tree: dict[str, torch.Tensor]) -> set[int]:
    return {tensor.data_ptr() for tensor in tree.values()}


def test_copies_stay_when_the_tensors_go_on() -> None:
    weight = nn.Parameter(torch.ones(3, 2))
    tree = {"a": weight, "b": [torch.zeros(2), (3, "text", None)], "shard": Shard(torch.full((2,), 5.0), (0,), (4,))}
    copies = HostCopies().copy(tree)
    with torch.no_grad():
        weight.zero_()
        tree["b"][0].add_(1)
        tree["shard"].block.zero_()
    assert torch.equal(copies["a"], torch.ones(3, 2))
    assert not copies["a"].requires_grad
    assert torch.equal(copies["b"][0], torch.zeros(2))
    assert copies["b"][1] == (3, "text", None)
    assert copies["shard"].offsets == (0,)
    assert torch.equal(copies["shard"].block, torch.full((2,), 5.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(6.0).reshape(2, 3).t(),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.ones(1).expand(3, 4),
        lambda: torch.tensor(2.5, dtype=torch.bfloat16),
        lambda: torch.zeros(0, 3),
        lambda: torch.tensor([[0.0, 1.0], [2.0, 0.0]]).to_sparse(),
        lambda: torch.randn(3, dtype=torch.complex64).conj(),
    ],
)
def test_copies_are_of_any_form(make: Callable[[], torch.Tensor]) -> None:
    tensor = make()
    copy = HostCopies().copy([tensor])[0]
    assert (copy.dtype, copy.shape, copy.layout) == (tensor.dtype, tensor.shape, tensor.layout)
    assert torch.equal(copy.to_dense(), tensor.to_dense()) if tensor.is_sparse else torch.equal(copy, tensor)


def test_memory_is_used_again_for_the_next_save() -> None:
    copies = HostCopies()
    state = {name: torch.randn(100, 10) for name in "abc"}
    first = copies.copy(state)
    taken = pointers(first)
    copies.fence()()
    copies.begin()
    state["a"].add_(1)
    second = copies.copy(dict(reversed(state.items())))
    assert pointers(second) == taken
    for name, tensor in state.items():
        assert torch.equal(second[name], tensor)


def test_memory_that_cannot_be_reserved_is_said_and_taken_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copies, state = HostCopies(), {"a": torch.randn(5)}

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patched:
        patched.setattr(copies, "_allocate", fail)
        copies.reserve(lambda keep: keep(state))
        assert copies._reserve_thread is not None
        copies._reserve_thread.join()
    assert "cannot be had beforehand (not enough memory)" in caplog.text
    copies.begin()
    assert torch.equal(copies.copy(state)["a"], state["a"])


@pytest.mark.cuda
def test_memory_reserved_for_a_gpu_is_pinned() -> None:
    copies, state = (
        HostCopies(),
        {"large": torch.ones(4096, 1024, device="cuda"), "small": torch.ones(8, device="cuda")},
    )
    copies.reserve(lambda keep: keep(state))
    assert copies._reserve_thread is not None
    copies._reserve_thread.join()
    reserved = {room.data_ptr() for rooms in copies._free_buffers.values() for room in rooms}
    copies.begin()
    taken = copies.copy(state)
    copies.fence()()
    assert pointers(taken) == reserved
    assert all(tensor.is_pinned() and bool((tensor == 1).all()) for tensor in taken.values())
    copies.close()
    assert copies._registered == set()


@pytest.mark.cuda
def test_copies_from_a_gpu_are_of_their_moment() -> None:
    """The device is busy when they are asked for, and changes the tensors right after."""
    device = torch.device("cuda")
    copies = HostCopies()
    state: dict[str, Any] = {"large": torch.zeros(4096, 1024, device=device), "small": torch.zeros(8, device=device)}
    for number in range(4):
        for tensor in state.values():
            tensor.fill_(number)
        torch.cuda._sleep(50_000_000)
        copies.begin()
        taken = copies.copy(state)
        wait = copies.fence()
        for tensor in state.values():
            tensor.fill_(-1)
        wait()
        assert all(bool((tensor == number).all()) for tensor in taken.values())
        assert taken["large"].is_pinned()
    assert len(copies._registered) == 1
    copies.close()
    assert copies._registered == set()
    # Registered memory can be registered again only if it was let go.
    assert HostCopies().copy(state)["large"].is_pinned()
