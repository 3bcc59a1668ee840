"""The Trainer's methods have their documented names, parameters and defaults, in both documented versions."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from hftrain import Seq2SeqTrainer, Trainer

SURFACE = json.loads((Path(__file__).parent / "documented_surface.json").read_text(encoding="utf-8"))["versions"]
CLASSES = {"Trainer": Trainer, "Seq2SeqTrainer": Seq2SeqTrainer}
# Answered with what to use instead.
GONE = {"init_git_repo", "prediction_loop", "torchdynamo_smart_context_manager"}
METHODS = [
    (version, kind, method)
    for version in SURFACE
    for kind in CLASSES
    for method in SURFACE[version]["classes"][kind]
    if method not in GONE
]
# The constructor of 4.24 has `tokenizer` in the place of `processing_class`, and no `compute_loss_func`, which the
# later version put before `compute_metrics`: these are keywords.
OTHER_PLACE = {"tokenizer", "model_init", "compute_metrics", "callbacks", "optimizers", "preprocess_logits_for_metrics"}
EMPTY = inspect.Parameter.empty


def documented_default(spec: dict[str, Any]) -> Any:
    default = spec.get("default", EMPTY)
    return tuple(default["tuple"]) if isinstance(default, dict) else default


@pytest.mark.parametrize(("version", "kind", "method"), METHODS)
def test_method_takes_what_is_documented(version: str, kind: str, method: str) -> None:
    """Names, order and defaults; a parameter more must have a default, so that documented calls mean the same."""
    specs = SURFACE[version]["classes"][kind][method]["parameters"]
    ours = inspect.signature(getattr(CLASSES[kind], method)).parameters
    positional = [name for name, p in ours.items() if p.kind is p.POSITIONAL_OR_KEYWORD and name != "self"]
    names = []
    for spec in specs:
        parameter = ours[spec["name"]]
        if spec.get("kind") == "var_keyword":
            assert parameter.kind is parameter.VAR_KEYWORD
            continue
        names.append(spec["name"])
        default = documented_default(spec)
        # A parameter that is documented as needed may have a default of ours.
        assert default is EMPTY or (parameter.default, type(parameter.default)) == (default, type(default))
    if version == "4.24" and method == "__init__":
        names = [name for name in names if name not in OTHER_PLACE]
    assert positional[: len(names)] == names
    more = set(ours) - {spec["name"] for spec in specs} - {"self"}
    kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    assert all(ours[name].default is not EMPTY or ours[name].kind in kinds for name in more)


def test_methods_are_there() -> None:
    missing = {method for _, kind, method in METHODS if not hasattr(CLASSES[kind], method)}
    assert missing == set()


def test_optimizer_choice_is_static() -> None:
    assert isinstance(inspect.getattr_static(Trainer, "get_optimizer_cls_and_kwargs"), staticmethod)
