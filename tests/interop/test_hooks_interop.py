"""The methods of the installed transformers' Trainer, each of which ours has or refuses with what to do instead."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from hftrain import Seq2SeqTrainer, Trainer  # noqa: E402
from hftrain.core.elsewhere import names_elsewhere  # noqa: E402

pytestmark = pytest.mark.interop


@pytest.mark.parametrize(
    ("theirs", "ours"), [(transformers.Trainer, Trainer), (transformers.Seq2SeqTrainer, Seq2SeqTrainer)]
)
def test_every_method_of_the_installed_trainer_is_ours_or_has_a_remedy(theirs: Any, ours: Any) -> None:
    methods = [
        name
        for name, value in vars(theirs).items()
        if isinstance(value, (FunctionType, property, staticmethod, classmethod)) and not name.startswith("__")
    ]
    assert len(methods) > 3
    hooks = {**names_elsewhere("trainer_hooks"), **names_elsewhere("newer_trainer_hooks")}
    unknown = [name for name in methods if not hasattr(ours, name) and name not in hooks]
    assert unknown == [], (
        "add them to hftrain/core/elsewhere.json, and the version to tests/documented/trainer_methods.json"
    )
