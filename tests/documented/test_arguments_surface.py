from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest

from hftrain.arguments import Seq2SeqTrainingArguments, TrainingArguments

SURFACE = json.loads((Path(__file__).parent / "documented_surface.json").read_text(encoding="utf-8"))["versions"]
CLASSES = {"TrainingArguments": TrainingArguments, "Seq2SeqTrainingArguments": Seq2SeqTrainingArguments}
LATER = {"parallelism_config": None, "project": "huggingface", "trackio_space_id": "trackio"}


def settings(version: str) -> list[tuple[str, dict]]:
    classes = SURFACE[version]["classes"]
    return [(name, spec) for name in CLASSES for spec in classes[name]["__init__"]["parameters"]]


def show(item: str | dict) -> str:
    return item if isinstance(item, str) else item["name"]


def defaults(cls: type) -> dict[str, object]:
    made = dataclasses.MISSING
    return {f.name: {"factory": True} if f.default is made else f.default for f in dataclasses.fields(cls)}


@pytest.mark.parametrize(("cls", "spec"), settings("4.5x"), ids=show)
def test_current_setting_has_its_name_and_default(cls, spec):
    ours = defaults(CLASSES[cls])
    assert spec["name"] in ours
    assert ours[spec["name"]] == spec["default"]
    assert type(ours[spec["name"]]) is type(spec["default"])


@pytest.mark.parametrize(("cls", "spec"), settings("4.24"), ids=show)
def test_setting_of_4_24_is_accepted(cls, spec):
    assert spec["name"] in inspect.signature(CLASSES[cls]).parameters


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("cls", CLASSES)
def test_signature_of_4_24_with_its_defaults_builds(cls):
    given = {spec["name"]: spec["default"] for name, spec in settings("4.24") if name == cls and "default" in spec}
    assert CLASSES[cls]("out", **given).optim == "adamw_torch"


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_but_documented_settings_is_there(cls):
    known = {spec["name"] for version in SURFACE for name, spec in settings(version) if name == cls}
    assert set(defaults(CLASSES[cls])) == known | set(LATER)
    assert {name: defaults(CLASSES[cls])[name] for name in LATER} == LATER


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
