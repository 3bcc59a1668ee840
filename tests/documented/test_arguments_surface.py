from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from hftrain import Seq2SeqTrainingArguments, TrainingArguments

SURFACE = json.loads((Path(__file__).parent / "documented_surface.json").read_text(encoding="utf-8"))["versions"]
CLASSES = {"TrainingArguments": TrainingArguments, "Seq2SeqTrainingArguments": Seq2SeqTrainingArguments}
# What docs/design/contradictions.md says of it: R665.
NEWER_DEFAULTS = {"average_tokens_across_devices": True}
# `dataloader_timeout` is torch's own option of a loader, under the name that the others have.
LATER = {
    "activation_checkpointing": None,
    "activation_checkpointing_kwargs": None,
    "dataloader_in_order": True,
    "dataloader_timeout": 0,
    "dataloader_multiprocessing_context": None,
    "ddp_static_graph": None,
    "enable_jit_checkpoint": False,
    "parallelism_config": None,
    "project": "huggingface",
    "train_sampling_strategy": "random",
    "trackio_bucket_id": None,
    "trackio_space_id": "trackio",
    "trackio_static_space_id": None,
    "use_cache": None,
}


def documented(version: str, cls: str) -> dict[str, dict]:
    """Return the documented settings of a class by name."""
    return {spec["name"]: spec for spec in SURFACE[version]["classes"][cls]["__init__"]["parameters"]}


def defaults(cls: str) -> dict[str, object]:
    made = dataclasses.MISSING
    return {f.name: {"factory": True} if f.default is made else f.default for f in dataclasses.fields(CLASSES[cls])}


@pytest.mark.parametrize("cls", CLASSES)
def test_current_settings_have_their_names_and_defaults(cls):
    ours, theirs = defaults(cls), {name: spec["default"] for name, spec in documented("4.5x", cls).items()}
    theirs |= NEWER_DEFAULTS
    assert {name: (ours[name], type(ours[name])) for name in theirs} == {n: (d, type(d)) for n, d in theirs.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("cls", CLASSES)
def test_signature_of_4_24_with_its_defaults_builds(cls):
    given = {name: spec["default"] for name, spec in documented("4.24", cls).items() if "default" in spec}
    assert CLASSES[cls]("out", **given).optim == "adamw_torch"


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_but_documented_settings_is_there(cls):
    ours, known = defaults(cls), {name for version in SURFACE for name in documented(version, cls)}
    assert {name: default for name, default in ours.items() if name not in known} == LATER


@pytest.mark.parametrize("version", SURFACE)
@pytest.mark.parametrize("cls", CLASSES)
def test_methods_have_their_documented_signatures(version, cls):
    for method, spec in SURFACE[version]["classes"][cls].items():
        if method == "__init__":
            continue
        parameters = inspect.signature(getattr(CLASSES[cls], method)).parameters
        empty = inspect.Parameter.empty
        ours = {name: parameter.default for name, parameter in parameters.items() if name != "self"}
        assert ours == {item["name"]: item.get("default", empty) for item in spec["parameters"]}
