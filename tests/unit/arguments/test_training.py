from __future__ import annotations

import dataclasses
import inspect
import subprocess
import sys
import textwrap
import typing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hftrain import Seq2SeqTrainingArguments, TrainingArguments


@dataclass
class OwnArguments(TrainingArguments):
    extra: int = 3
    names: list[str] = field(default_factory=list)


class CustomInit(TrainingArguments):
    def __init__(self, folder: str, **kwargs: typing.Any) -> None:
        super().__init__(folder, **kwargs)


# The package's own __init__ imports every room; here one room stands alone.
ROOM_ALONE = """
import importlib.util, sys, types
package = types.ModuleType("hftrain")
package.__path__ = importlib.util.find_spec("hftrain").submodule_search_locations
sys.modules["hftrain"] = package
"""


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ROOM_ALONE + textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_subclass_with_own_fields_works():
    args = OwnArguments("out", extra=7, max_steps=5)
    assert (args.extra, args.names, args.max_steps) == (7, [], 5)


def test_subclass_with_own_init_works():
    assert CustomInit("out", max_steps=5).max_steps == 5
    with pytest.raises(TypeError):
        CustomInit("out", no_such=1)


def test_every_field_has_help_and_a_resolvable_type():
    hints = typing.get_type_hints(Seq2SeqTrainingArguments)
    for spec in dataclasses.fields(Seq2SeqTrainingArguments):
        assert spec.metadata["help"].endswith((".", ".'")), spec.name
        assert spec.name in hints


def test_import_and_building_need_no_torch():
    run_python(
        """
        from hftrain.arguments.training import Seq2SeqTrainingArguments

        Seq2SeqTrainingArguments("out", fp16=True).to_json_string()
        assert not {"torch", "accelerate", "numpy"} & set(sys.modules)
        """
    )


def test_signature_shows_the_settings():
    names = list(inspect.signature(OwnArguments).parameters)
    assert names[:2] == ["output_dir", "extra"]
    assert "learning_rate" in names


def test_building_touches_no_file_network_or_environment():
    run_python(
        """
        import os
        from hftrain.arguments.training import Seq2SeqTrainingArguments

        class Sealed(dict):
            def __getitem__(self, key): raise AssertionError(key)
            get = __contains__ = __setitem__ = __getitem__

        def refuse(event, args):
            if event == "open" or event.startswith(("socket", "os.", "subprocess")):
                raise AssertionError((event, args))

        Seq2SeqTrainingArguments()
        os.environ = Sealed()
        sys.addaudithook(refuse)
        Seq2SeqTrainingArguments(
            "out", fp16=True, deepspeed="ds.json", accelerator_config="acc.json", report_to="all", eval_strategy="steps"
        )
        """
    )


def test_none_takes_a_setting_of_two_names_back(tmp_path: Path) -> None:
    options = {"use_reentrant": True}
    args = TrainingArguments(str(tmp_path), gradient_checkpointing=True, gradient_checkpointing_kwargs=options)
    args.gradient_checkpointing_kwargs = None
    assert args.gradient_checkpointing_kwargs is args.activation_checkpointing_kwargs is None
