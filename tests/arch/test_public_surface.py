"""The public names are a promise: none appears or goes by accident.

After a change on purpose, write the list anew, with transformers installed, and tell about it in CHANGELOG.md::

    python -c "import hftrain; print(*sorted(hftrain.__all__), sep='\\n')" > tests/arch/public_names.txt
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.source import handed_on

import hftrain

# They are public where transformers is installed.
HANDED_ON = handed_on().keys()
FROZEN = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").split()


def test_public_names_are_the_frozen_ones() -> None:
    assert sorted({*hftrain.__all__, *HANDED_ON}) == FROZEN


def test_public_names_are_not_listed_twice() -> None:
    assert len(hftrain.__all__) == len(set(hftrain.__all__))


def test_public_names_exist_and_are_listed_by_dir() -> None:
    assert [name for name in hftrain.__all__ if not hasattr(hftrain, name)] == []
    assert set(hftrain.__all__) <= set(dir(hftrain))


def test_public_classes_and_functions_are_documented() -> None:
    public = [(name, getattr(hftrain, name)) for name in set(hftrain.__all__) - HANDED_ON]
    assert [name for name, value in public if callable(value) and not inspect.getdoc(value)] == []


MODULES = [module.name for module in pkgutil.walk_packages(hftrain.__path__, "hftrain.")]


@pytest.mark.parametrize("name", MODULES)
def test_module_is_imported_by_its_dotted_name(name: str) -> None:
    for public in hftrain.__all__:
        getattr(hftrain, public)
    found: dict[str, Any] = {}
    exec(f"import {name} as found", found)
    assert found["found"] is sys.modules[name]


@pytest.mark.parametrize(("name", "home"), [("loggers", "registry"), ("loops", "contract"), ("strategies", "registry")])
def test_package_that_is_a_public_name_holds_what_its_registry_does(name: str, home: str) -> None:
    package, registry = getattr(hftrain, name), getattr(sys.modules[f"hftrain.{name}.{home}"], name)
    methods = ("register", "names", "summary", "resolve", "create")
    assert [each for each in methods if getattr(package, each) != getattr(registry, each)] == []


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("strategies", ("Strategy", "SingleDeviceStrategy", "MPSStrategy", "DDPStrategy", "DataParallelStrategy")),
        ("strategies", ("FSDPStrategy", "MeshStrategy", "DeepSpeedStrategy", "XLAStrategy")),
        ("strategies.fsdp", ("FSDPStrategy",)),
        ("strategies.deepspeed", ("DeepSpeedStrategy",)),
        ("loggers", ("Logger", "WandbLogger", "TensorBoardLogger", "CometLogger", "DVCLiveLogger")),
    ],
)
def test_classes_are_imported_from_their_package(module: str, names: tuple[str, ...]) -> None:
    found: dict[str, Any] = {}
    exec(f"from hftrain.{module} import {', '.join(names)}", found)
    assert [found[name].__name__ for name in names] == list(names)


@pytest.mark.parametrize(
    ("name", "remedy"), [("TrainingArgs", "Did you mean 'TrainingArguments'"), ("Xyzzy", "has no attribute 'Xyzzy'")]
)
def test_name_that_is_not_there_is_answered_with_a_similar_one(name: str, remedy: str) -> None:
    assert not hasattr(hftrain, name)
    with pytest.raises(AttributeError, match=re.escape(remedy)):
        getattr(hftrain, name)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("EarlyStopping", "Use EarlyStoppingCallback"),
        ("LightningModule", "Derive from TaskModule"),
        ("LightningDataModule", "train_dataset"),
        ("ModelCheckpoint", "save_strategy"),
        ("Callback", "Use TrainerCallback"),
        ("seed_everything", "Use set_seed"),
    ],
)
def test_name_of_another_library_is_answered_with_the_one_to_use(name: str, remedy: str) -> None:
    with pytest.raises(ImportError, match=re.escape(remedy)):
        exec(f"from hftrain import {name}")
