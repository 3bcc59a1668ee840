"""Weights in a folder, in every form."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from hftrain.checkpoint.weights import (
    load_task_state,
    load_weights,
    matching_weights,
    read_weights,
    save_task_state,
    save_weights,
)
from hftrain.core.errors import CheckpointError
from hftrain.storage.tensors import save_containers, save_tensors


class Tied(nn.Module):
    """Input and output embeddings are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


class Extra(nn.Linear):
    """Has a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def equal(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def shard(model: nn.Module, folder: Path, *, safe: bool = True) -> dict[str, str]:
    stem, end = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    names = {}
    for index, (name, tensor) in enumerate(model.state_dict().items()):
        names[name] = f"{stem}-{index:05}.{end}"
        (save_tensors if safe else save_containers)({name: tensor}, folder / names[name])
    (folder / f"{stem}.{end}.index.json").write_text(json.dumps({"weight_map": names}))
    return names


@pytest.mark.parametrize("safe", [True, False])
def test_sharded_weights_are_found(tmp_path, safe):
    model, fresh = nn.Linear(2, 3), nn.Linear(2, 3)
    shard(model, tmp_path, safe=safe)
    load_weights(fresh, tmp_path)
    assert equal(model, fresh)


@pytest.mark.parametrize("safe", [True, False])
def test_save_weights_replaces_every_earlier_form(tmp_path, safe):
    shard(nn.Linear(4, 4), tmp_path, safe=True)
    shard(nn.Linear(4, 4), tmp_path, safe=False)
    save_weights(nn.Linear(5, 5), tmp_path, safe=not safe)
    (tmp_path / "model_of_mine.safetensors").touch()
    save_weights(nn.Linear(2, 3), tmp_path, safe=safe)
    names = {"model_of_mine.safetensors", "model.safetensors" if safe else "pytorch_model.bin"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_tied_weight_that_the_file_leaves_out_is_accepted(tmp_path):
    model, fresh = Tied(), Tied()
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    save_tensors(state, tmp_path / "model.safetensors")
    load_weights(fresh, tmp_path)
    assert equal(model, fresh)
    assert fresh.head.weight is fresh.embedding.weight


def test_an_untied_weight_that_the_file_leaves_out_is_not_accepted(tmp_path):
    fresh = Tied()
    fresh.head.weight = nn.Parameter(torch.ones(5, 3))
    state = {name: value for name, value in Tied().state_dict().items() if name != "head.weight"}
    save_tensors(state, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing: head\.weight"):
        load_weights(fresh, tmp_path)


def test_missing_and_unexpected_names_are_listed(tmp_path, caplog):
    save_tensors({"weight": torch.zeros(3, 2), "other": torch.zeros(1)}, tmp_path / "model.safetensors")
    model = nn.Linear(2, 3)
    with pytest.raises(CheckpointError, match=r"missing: bias; unexpected: other"):
        load_weights(model, tmp_path)
    assert model.weight.any()
    with caplog.at_level(logging.WARNING):
        load_weights(model, tmp_path, strict=False)
    assert not model.weight.any()
    assert "missing: bias; unexpected: other" in caplog.text


@pytest.mark.parametrize("strict", [True, False])
def test_another_shape_is_refused(tmp_path, strict):
    save_weights(nn.Linear(2, 4), tmp_path)
    with pytest.raises(CheckpointError, match="size mismatch for weight"):
        load_weights(nn.Linear(2, 3), tmp_path, strict=strict)


def test_weights_that_a_model_leaves_out_itself_stay_as_they_are(tmp_path):
    model = nn.Linear(2, 3)
    model._keys_to_ignore_on_save = ["bias"]
    save_tensors({"weight": torch.zeros(3, 2)}, tmp_path / "model.safetensors")
    assert torch.equal(matching_weights(model, tmp_path)["bias"], model.bias)


def test_extra_state_needs_the_other_format(tmp_path):
    with pytest.raises(CheckpointError, match=r"_extra_state are not tensors.*save_safetensors=False"):
        save_weights(Extra(2, 3), tmp_path)
    save_weights(Extra(2, 3), tmp_path, safe=False)
    fresh = Extra(2, 3)
    load_weights(fresh, tmp_path)
    assert fresh.calls == 3


def test_a_folder_without_weights_says_what_it_has(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors.*adapter_model\.safetensors"):
        read_weights(tmp_path)
    with pytest.raises(CheckpointError, match=r"found=\[\]"):
        read_weights(tmp_path / "absent")


def test_weights_that_are_no_dictionary_are_refused(tmp_path):
    torch.save([1], tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="holds a list"):
        read_weights(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "optimizer.pt", 3])
def test_an_index_that_names_other_files_is_refused(tmp_path, name):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"weight": name}}))
    with pytest.raises(CheckpointError, match="does not map names to files next to it"):
        read_weights(tmp_path)


@pytest.mark.parametrize("content", [[], {}, {"weight_map": []}])
def test_an_index_of_another_form_is_refused(tmp_path, content):
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="does not map"):
        read_weights(tmp_path)


def test_an_index_and_its_shards_must_agree(tmp_path):
    names = shard(nn.Linear(2, 3), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {**names, "c": names["bias"]}}))
    with pytest.raises(CheckpointError, match=r"differ in \['c'\]"):
        read_weights(tmp_path)
    (tmp_path / names["bias"]).unlink()
    with pytest.raises(CheckpointError, match=names["bias"]):
        read_weights(tmp_path)


@pytest.mark.parametrize("names", [[], ["a", "b"], ["b"]])
def test_task_state_of_another_task_is_refused(tmp_path, names):
    save_task_state({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointError, match=r"It holds \['a'\]"):
        load_task_state(tmp_path, names)


def test_task_state_that_is_missed_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"task_state\.safetensors.*does not exist"):
        load_task_state(tmp_path, ["a"])
