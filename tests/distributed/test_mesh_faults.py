"""The ways to be wrong on a mesh, planted one by one into the source: each is seen by a proof or by the strategy."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from support.meshes import prove

pytestmark = pytest.mark.distributed

MESH = "hftrain.strategies.mesh"
LLAMA: dict[str, Any] = {"model": "llama", "clip": 0.5, "padding": 30}
# Name of the fault: the function, what is replaced by what, and the case that sees it.
FAULTS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "tied weights are untied": (
        "plans:install", "if id(parameter) not in replacements:", "if True:", {**LLAMA, "mesh": "tp", "tied": True},
    ),
    "a parameter is left plain": (
        "plans:install", "if isinstance(parameter, DTensor):", "if placing.dims.get(name) is None:",
        {**LLAMA, "mesh": "tp"},
    ),
    "a parameter that all hold is counted by each in the norm": (
        "..fsdp.states:norm_of", "if not any(index", "if any(True or index", {**LLAMA, "mesh": "tp"},
    ),
    "gradients of the input are not summed": (
        "styles:Colwise.before", "enter(ranks.proof.note_input(module, x), ranks.mesh)", "x", {**LLAMA, "mesh": "tp"},
    ),
    "a norm of heads is taken for whole": (
        "styles:Style.local", "self.partial or ranks.sequence", "ranks.sequence",
        {**LLAMA, "model": "qwen3", "mesh": "tp"},
    ),
    "the bias is added by each rank": (
        "styles:Rowwise.before", "if bias is not None:", "if False:", {**LLAMA, "model": "gpt2", "mesh": "tp"},
    ),
    "the padding token is looked up in another row": (
        "styles:Vocabulary.before", "padding - ranks.rank * num if", "padding if",
        {**LLAMA, "mesh": "tp", "padding": 0},
    ),
    "norms between the blocks have a part of their gradient": (
        "styles:Style.local", "self.partial or ranks.sequence", "self.partial",
        {**LLAMA, "mesh": "tp, sequence_parallel"},
    ),
    "the parts of a vocabulary are compared with different maxima": (
        "loss:cross_entropies", "dist.all_reduce(maximum", "(lambda *_, **__: None)(maximum",
        {**LLAMA, "mesh": "tp, loss_parallel"},
    ),
    "the divisor is wrong by cp": (
        "context:split_context", "sums=True", "sums=False", {**LLAMA, "mesh": "cp"},
    ),
    "labels are shifted after the split": (
        "loss:_before", "F.pad(labels[..., 1:], (0, 1), value=_IGNORED)",
        "torch.cat([F.pad(x[..., 1:], (0, 1), value=_IGNORED) for x in labels.tensor_split(2, 1)], 1)",
        {**LLAMA, "mesh": "cp, loss_parallel", "labels": "whole"},
    ),
    "each rank divides by its own labels": (
        "loss:_loss", 'step["count"] if num_items_in_batch is None else num_items_in_batch',
        "(targets != _IGNORED).sum()", {**LLAMA, "mesh": "cp, loss_parallel"},
    ),
    "each rank of the sequence keeps its own loss": (
        "loss:_loss", "enter(leave(total, sequence), sequence)", "total", {**LLAMA, "mesh": "cp, loss_parallel"},
    ),
    "the causal mask begins at each part": (
        "attention:SplitAttention._by_rows", "self._mesh.get_local_rank() * query.shape[2]", "0 * query.shape[2]",
        {**LLAMA, "model": "gpt2", "mesh": "cp", "options": {"attention": "gather"}},
    ),
}  # fmt: skip


@contextmanager
def planted(place: str, old: str, new: str) -> Iterator[None]:
    """Replace text in the source of a function, and everywhere its module's namespace is used."""
    where, _, name = place.partition(":")
    module = importlib.import_module(f"hftrain.strategies{where[1:]}" if where.startswith("..") else f"{MESH}.{where}")
    owner: Any = module
    *path, name = name.split(".")
    for each in path:
        owner = getattr(owner, each)
    own = vars(owner)[name]
    source = textwrap.dedent(inspect.getsource(own))
    assert source.count(old) == 1, (place, old)
    namespace = dict(vars(module))
    # `super()` without arguments needs the class around it.
    exec(re.sub(r"super\(\)", f"super({'.'.join(path)}, self)", source.replace(old, new)), namespace)
    users = [each for each in list(sys.modules.values()) if getattr(each, "__name__", "").startswith("hftrain")]
    holders = [(each, key) for each in users for key, value in list(vars(each).items()) if value is own]
    setattr(owner, name, namespace[name])
    for each, key in holders:
        setattr(each, key, namespace[name])
    try:
        yield
    finally:
        setattr(owner, name, own)
        for each, key in holders:
            setattr(each, key, own)


def plant(names: list[str]) -> dict[str, Any]:
    """Return what a proof says of each fault: differences, or an error."""
    found: dict[str, Any] = {}
    for name in names:
        place, old, new, case = FAULTS[name]
        with planted(place, old, new):
            try:
                found[name] = prove([case])[0]
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.mark.guarantees
@pytest.mark.parametrize("name", list(FAULTS))
def test_faults_are_seen(run_distributed: Any, name: str) -> None:
    told = [answer[name] for answer in run_distributed(plant, num_processes=2, names=[name])]
    print(name, told[0])
    assert not all(isinstance(each, dict) and all(value < 1e-6 for value in each.values()) for each in told)
    # What ends in an error does so where torch, a test or the strategy sees it, not in the changed source itself.
    assert not any(str(each).startswith(("NameError", "SyntaxError", "RuntimeError: super")) for each in told)
