"""What a model's class and signature tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import Net
from torch import nn

from hftrain.task.introspect import (
    accepts_item_count,
    find_label_names,
    is_causal,
    is_recomputing,
    keys_to_ignore,
)


def make_model(name: str = "Toy", forward: Any = None, **attributes: Any) -> nn.Module:
    """Return a model of a class with that name, `forward` and attributes."""
    attributes["forward"] = forward or (lambda self, x, labels=None: None)
    return type(name, (nn.Module,), attributes)()


class Adapter(nn.Module):
    """Wrap a model as PEFT does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def get_base_model(self) -> nn.Module:
        return self.inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


transformers_like = {"config": SimpleNamespace(), "save_pretrained": lambda self, folder: None}


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (Net(), ["labels"]),
        (make_model(forward=lambda self, x, label, next_sentence_label, y: 0), ["label", "next_sentence_label"]),
        (make_model(forward=lambda self, x, start_positions, end_positions: 0), []),
        (
            make_model("ToyForQuestionAnswering", lambda self, x, start_positions, end_positions: 0),
            ["start_positions", "end_positions"],
        ),
        (make_model(forward=lambda self, *args, **kwargs: 0), []),
    ],
)
def test_label_names_are_read_from_forward(model: nn.Module, names: list[str]) -> None:
    assert find_label_names(model) == names


@pytest.mark.parametrize(
    ("model", "accepts"),
    [
        (Net(), False),
        (make_model(forward=lambda self, x, num_items_in_batch=None: 0), True),
        (make_model(forward=lambda self, x, **kwargs: 0), True),
        (make_model(forward=lambda self, x, labels=None: 0, **transformers_like), False),
        (make_model(forward=lambda self, x, **kwargs: 0, accepts_loss_kwargs=True), True),
        (make_model(forward=lambda self, x, **kwargs: 0, accepts_loss_kwargs=False), False),
        (Adapter(make_model(forward=lambda self, x, num_items_in_batch=None: 0)), True),
        (Adapter(make_model(forward=lambda self, x, **kwargs: 0)), True),
        (Adapter(Net()), False),
    ],
)
def test_item_count_is_for_models_that_say_so(model: nn.Module, accepts: bool) -> None:
    assert accepts_item_count(model) is accepts


def test_the_name_of_a_users_class_does_not_make_it_causal() -> None:
    assert not is_causal(make_model("ToyForCausalLM"))
    assert not is_causal(make_model("ToyForConditionalGeneration", config=SimpleNamespace()))


@pytest.mark.parametrize("name", ["is_activation_checkpointing", "is_gradient_checkpointing"])
@pytest.mark.parametrize("value", [True, False])
def test_recomputing_is_read_from_the_class(name: str, value: bool) -> None:
    assert is_recomputing(make_model(**{name: value})) is value


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (
            SimpleNamespace(keys_to_ignore_at_inference=["past_key_values"]),
            ["past_key_values", "cache", "cache_params"],
        ),
        (SimpleNamespace(keys_to_ignore_at_inference=["cache"]), ["cache", "past_key_values", "cache_params"]),
        (SimpleNamespace(keys_to_ignore_at_inference=["mems"]), ["mems"]),
        (SimpleNamespace(keys_to_ignore_at_inference=[]), []),
        (SimpleNamespace(keys_to_ignore_at_inference=None), ["cache", "past_key_values", "cache_params"]),
        (SimpleNamespace(), ["cache", "past_key_values", "cache_params"]),
        (None, []),
    ],
)
def test_outputs_that_are_no_predictions_are_named_by_the_config(config: Any, keys: list[str]) -> None:
    assert keys_to_ignore(Adapter(make_model(config=config))) == keys
