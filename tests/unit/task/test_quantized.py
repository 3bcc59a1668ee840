"""Quantized models and models spread over devices, by the flags their libraries set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.tiny import Net, make_arguments, make_rows

from hftrain import ConfigError, Trainer
from hftrain.task.introspect import check_quantized, has_adapters, is_on_several_devices, is_quantized


def make_model(**flags: Any) -> Net:
    model = Net()
    for name, value in flags.items():
        setattr(model, name, value)
    return model


QUANTIZED = [
    {"is_loaded_in_8bit": True},
    {"is_loaded_in_4bit": True},
    {"is_quantized": True},
    {"hf_quantizer": SimpleNamespace(is_trainable=True, is_qat_trainable=False)},
]


@pytest.mark.parametrize("flags", QUANTIZED)
def test_quantized_model_needs_adapters(tmp_path: Path, flags: dict[str, Any]) -> None:
    model = make_model(**flags)
    assert is_quantized(model)
    trainer = Trainer(model, make_arguments(tmp_path), train_dataset=make_rows(), eval_dataset=make_rows())
    with pytest.raises(ConfigError, match=r"Cannot train Net, a quantized model.*Add trainable adapters"):
        trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0  # evaluating it is fine


@pytest.mark.parametrize("flags", QUANTIZED)
def test_quantized_model_with_adapters_trains_and_is_not_moved(
    tmp_path: Path, flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model(**flags, _hf_peft_config_loaded=True)
    assert has_adapters(model)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("moved")

    monkeypatch.setattr(model, "to", refuse)
    Trainer(model, make_arguments(tmp_path, max_steps=1), train_dataset=make_rows()).train()


@pytest.mark.parametrize("flags", QUANTIZED)
def test_quantized_model_is_not_compiled(tmp_path: Path, flags: dict[str, Any]) -> None:
    model = make_model(**flags, _hf_peft_config_loaded=True)
    trainer = Trainer(model, make_arguments(tmp_path, torch_compile_backend="eager"), train_dataset=make_rows())
    with pytest.raises(ConfigError, match="cannot be compiled"):
        trainer.train()


def test_method_without_gradients_is_refused() -> None:
    model = make_model(hf_quantizer=SimpleNamespace(is_trainable=False, is_qat_trainable=False), peft_config={})
    with pytest.raises(ConfigError, match="passes no gradients on"):
        check_quantized(model, compiles=False)


def test_quantization_aware_training_needs_no_adapters() -> None:
    check_quantized(make_model(hf_quantizer=SimpleNamespace(is_trainable=True, is_qat_trainable=True)), compiles=False)


def test_spread_model_stays_where_it_is(tmp_path: Path) -> None:
    model = make_model(hf_device_map={"a": 0, "b": 1})
    assert is_on_several_devices(model)
    trainer = Trainer(model, make_arguments(tmp_path))
    assert trainer.is_model_parallel
    assert not trainer.strategy.place_model
    assert not is_on_several_devices(make_model(hf_device_map={"": 0}))
    assert is_on_several_devices(make_model(is_parallelizable=True, model_parallel=True))
    ordinary = Trainer(Net(), make_arguments(tmp_path))
    assert not ordinary.is_model_parallel
    assert ordinary.strategy.place_model
