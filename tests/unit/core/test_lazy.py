"""The names that are handed on from transformers, with it and without."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
from support.source import handed_on

import hftrain
from hftrain import MissingDependencyError
from hftrain.core import extras
from hftrain.core.lazy import lazy_names

HOMES = handed_on()


@pytest.mark.interop
@pytest.mark.parametrize("name", HOMES)
def test_name_is_the_object_of_transformers(name: str) -> None:
    if name == "NotebookProgressCallback":
        pytest.importorskip("IPython")
    assert getattr(hftrain, name) is getattr(importlib.import_module(HOMES[name]), name)
    assert name in hftrain.__all__


def test_name_without_transformers_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(extras, "_cache", lambda requirement: False)
    monkeypatch.setattr(extras, "_version", lambda package: None)
    for package in ("hftrain", "hftrain.cli"):
        get, _, names = lazy_names(package)
        assert not set(HOMES) & set(names)
        with pytest.raises(MissingDependencyError, match=r"HfArg: .*Run: pip install 'hftrain\[transformers\]'"):
            get("HfArg")
    for name in HOMES:
        with pytest.raises(ImportError, match=name):
            lazy_names("hftrain")[0](name)


WITHOUT = """
import sys

sys.modules["transformers"] = None
from hftrain import *

print(Trainer.__name__, TrainingArguments("out", lr_scheduler_type="cosine").optim.value)
try:
    from hftrain import Adafactor
except ImportError as error:
    print(error)
"""


def test_every_other_name_is_there_without_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Trainer adamw_torch\nCannot use hftrain.Adafactor: ")


@pytest.mark.interop
def test_name_that_the_installed_transformers_lacks_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(importlib.import_module("transformers.optimization"), "get_greedy_schedule")
    with pytest.raises(
        MissingDependencyError, match=r"get_greedy_schedule: transformers\.optimization of the installed"
    ):
        lazy_names("hftrain")[0]("get_greedy_schedule")
