"""Tensors on disk: what goes in comes out, and nothing else goes in."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support import hostile

from hftrain.core.errors import CheckpointError
from hftrain.storage.shards import load_tensors
from hftrain.storage.tensors import check_tensors, load_containers, save_containers, save_tensors

Pair = namedtuple("Pair", "a b")


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_tensors_round_trip_with_aliases_views_and_strides(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    saved = {
        "a": base,
        "tied": base,
        "row": base[1],
        "transposed": base.t(),
        "empty": torch.empty(0, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(())),
    }
    save_tensors(saved, tmp_path / "x.safetensors")
    loaded = load_tensors(tmp_path / "x.safetensors")
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    assert loaded["tied"].data_ptr() == loaded["a"].data_ptr()
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        assert set(file.keys()) == saved.keys() - {"tied"}
        assert file.metadata()["format"] == "pt"


DTYPES = sorted({getattr(torch, name) for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}, key=str)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of its rarer kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_file_has_the_bytes_that_the_formats_library_writes(tmp_path, dtype):
    memory = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2  # which no kind of number changes
    tensors = {"b": memory.view(dtype).reshape(2, 3), 'ä\n"': memory[: dtype.itemsize].clone().view(dtype)}
    try:
        check_tensors(tensors)
    except CheckpointError:
        with pytest.raises(CheckpointError, match="Cannot save b"):
            save_tensors(tensors, tmp_path / "ours")
        return
    save_tensors(tensors, tmp_path / "ours")
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("tensor", [torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex128)])
def test_save_tensors_names_what_the_format_cannot_hold(tmp_path, tensor):
    with pytest.raises(CheckpointError, match="Cannot save odd"):
        save_tensors({"a": torch.ones(1), "odd": tensor}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="Cannot save odd"):
        check_tensors({"a": torch.ones(1), "odd": tensor})


@pytest.mark.parametrize("damage", ["absent", "cut", "header", "alias"])
def test_load_tensors_names_a_damaged_file(tmp_path, damage):
    path = tmp_path / "x.safetensors"
    tensor = torch.ones(10)
    save_tensors({"a": tensor, "b": tensor}, path)
    data = path.read_bytes()
    changed = {
        "absent": None,
        "cut": data[:-1],
        "header": b"\xff" * 8 + data[8:],
        "alias": data.replace(rb"\"b\": \"a\"", rb"\"b\": \"z\""),
    }[damage]
    assert changed != data
    path.unlink() if changed is None else path.write_bytes(changed)
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        load_tensors(path)


EXACT = {
    "Counter": Counter({2: 1, 4: 2}),
    "OrderedDict": OrderedDict(b=1, a=2),
    "set": {1, "a", (2, None)},
    "complex": 1 + 2j,
    "bytes": b"a\xff",
    "bytearray": bytearray(b"a\xff"),
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
    "layout": torch.strided,
    "size": torch.Size([2, 3]),
    "sparse": torch.eye(2).to_sparse(),
}


@pytest.mark.parametrize("name", EXACT)
def test_containers_keep_every_type_that_torch_reads_safely(tmp_path, name):
    save_containers({"a": [EXACT[name]]}, tmp_path / "x.pt")
    (loaded,) = load_containers(tmp_path / "x.pt")["a"]
    assert type(loaded) is type(EXACT[name])
    assert torch.equal(loaded.to_dense(), torch.eye(2)) if name == "sparse" else loaded == EXACT[name]


@pytest.mark.parametrize(
    "foreign",
    [Bomb(Path()), len, numpy.float32(1), numpy.ones(2), defaultdict(int), Pair(1, 2), b"", torch.nn.Linear(1, 1)],
    ids=lambda value: type(value).__name__,
)
def test_save_containers_refuses_anything_else_and_says_where(tmp_path, foreign):
    with pytest.raises(CheckpointError, match=r"state\['a'\]\[1\]\['b'\]"):
        save_containers({"a": [0, {"b": foreign}]}, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.parametrize("key", [numpy.float32(1), ((1, 2), 3), 1 << 64, b"a", torch.float32], ids=repr)
def test_save_containers_refuses_keys_that_could_not_be_read(tmp_path, key):
    for tree in ({key: 0}, {key}):
        with pytest.raises(CheckpointError, match=r"Cannot save state.* which"):
            save_containers(tree, tmp_path / "x.pt")


def test_save_containers_refuses_what_holds_itself(tmp_path):
    tree = {}
    tree["self"] = tree
    with pytest.raises(CheckpointError, match="holds itself"):
        save_containers(tree, tmp_path / "x.pt")


def nested(depth: int) -> list[Any]:
    tree: list[Any] = []
    for _ in range(depth - 1):
        tree = [tree]
    return tree


# What a state may hold, up to the limits.
LARGE = {
    "many values": lambda: {"a": [None] * 4_100_000},
    "deep": lambda: nested(101),
    "long integer": lambda: [2**2039 - 1, 1 - 2**2039],
    "expanded": lambda: [torch.ones(1).expand((1 << 26) + 1)],
    "overlapping": lambda: [torch.arange(1 << 13).unfold(0, 1 << 12, 1)] * 3,
    "quantized": lambda: [torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)],
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("name", LARGE)
def test_what_is_saved_can_be_read(tmp_path, name):
    tree = LARGE[name]()
    save_containers(tree, tmp_path / "x.pt")
    loaded = load_containers(tmp_path / "x.pt")
    if isinstance(tree, list) and isinstance(tree[0], torch.Tensor):
        assert torch.equal(loaded[0], tree[0])
    else:
        assert loaded == tree


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda: nested(102), "nested more than 100 deep"),
        (lambda: {"a": 2**2039}, "more than 2039 bits"),
        (lambda: [torch.nested.nested_tensor([torch.ones(1)])], "nested tensor"),
        (lambda: [torch.ones(1, device="meta")], "on meta"),
        (lambda: [torch.ones(1).to_mkldnn()], "mkldnn"),
        (lambda: [torch.empty(1, dtype=torch.uint4)], "uint4"),
    ],
    ids=["deep", "long integer", "nested", "meta", "mkldnn", "uint4"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_could_not_be_read_is_not_saved(tmp_path, value, reason):
    with pytest.raises(CheckpointError, match=reason):
        save_containers(value(), tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_names_that_the_format_of_the_weights_has_no_room_for_are_refused_before_a_save(tmp_path):
    weight = torch.ones(())
    tensors = {f"{number}{'x' * 999_000}": weight for number in range(102)}
    with pytest.raises(CheckpointError, match="the format allows 100000000"):
        check_tensors(tensors)
    tensors = {f"{number}{'x' * 999_000}": torch.ones(()) for number in range(50)}
    save_tensors(tensors, tmp_path / "x.safetensors")
    assert load_tensors(tmp_path / "x.safetensors").keys() == tensors.keys()


HOSTILE = {
    "pickle": "not in the zip format",
    "bomb": "GLOBAL",
    "bomb in the older format": "not in the zip format",
    "bomb in the oldest format": "not in the zip format",
    "module": "GLOBAL torch.nn.modules.linear.Linear",
    "compressed": "compressed or encrypted",
    "overlapping": "overlap",
    "laughs": "repeats values",
    "endless": "holds itself",
    "lying size": "larger than its memory|bytes",
    "reaching beyond": "storage",
    "reaching one beyond": "storage",
    "expanded": "larger than its memory",
    "nested": "100 deep",
    "colliding keys": "not text or a short number",
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such files")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused_with_the_reason_and_run_no_code(tmp_cwd, name):
    path = tmp_cwd / "x.pt"
    (hostile.ZIPPED | hostile.ANYWHERE)[name](path)
    for with_numpy in (False, True):
        with pytest.raises(CheckpointError, match=rf"x\.pt.*({HOSTILE[name]})") as caught:
            load_containers(path, with_numpy=with_numpy)
        assert "weights_only" not in str(caught.value)
    assert not (tmp_cwd / hostile.CANARY).exists()


def test_load_containers_accepts_numpy_only_where_asked(tmp_path):
    torch.save({"numpy": numpy.random.get_state()}, tmp_path / "rng.pth")
    with pytest.raises(CheckpointError):
        load_containers(tmp_path / "rng.pth")
    assert load_containers(tmp_path / "rng.pth", with_numpy=True)["numpy"][1].shape == (624,)
