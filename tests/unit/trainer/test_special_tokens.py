"""The tokens that end, begin and fill a text are the tokenizer's, in the model's configurations and in the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tiny
from support.tiny import Net, make_arguments, make_rows

from hftrain import Trainer


class Config:
    """The part of a model's configuration that tells its special tokens."""

    def __init__(self, **tokens: Any) -> None:
        vars(self).update(tokens)

    def get_text_config(self) -> Config:
        return vars(self).get("inner", self)


class Tool:
    """A tokenizer, or with `tokenizer` a processor, that is saved as a file."""

    def __init__(self, name: str = "tool", **tokens: Any) -> None:
        self.name = name
        vars(self).update(tokens)

    def save_pretrained(self, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text(json.dumps(self.name))


def tokenizer(pad: Any = 1, bos: Any = 2, eos: Any = 3) -> Tool:
    return Tool(pad_token_id=pad, bos_token_id=bos, eos_token_id=eos)


def train(folder: Path, model: Net, tool: Any = None, **options: Any) -> Trainer:
    options = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1, **options}
    return tiny.train(folder, model, processing_class=tool, **options)


def make_model(config: Config | None = None, generation: Config | None = None) -> Net:
    model = Net()
    if config is not None:
        model.config = config
    if generation is not None:
        model.generation_config = generation
    return model


NONE = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
OURS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
CASES: dict[str, tuple[Any, Any, Any, Any, Any]] = {
    # Tokenizer, config and generation config before, and both after.
    "absent": (tokenizer(), NONE, NONE, OURS, {**OURS, "eos_token_id": [3]}),
    "no generation": (tokenizer(), NONE, None, OURS, None),
    "others": (tokenizer(), dict.fromkeys(NONE, 9), dict.fromkeys(NONE, 9), OURS, {**OURS, "eos_token_id": [3, 9]}),
    "more ends": (tokenizer(), {**OURS, "eos_token_id": [8, 3]}, {**OURS, "eos_token_id": [8, 3]},
                  {**OURS, "eos_token_id": [8, 3]}, {**OURS, "eos_token_id": [8, 3]}),
    "new end": (tokenizer(), {**OURS, "eos_token_id": [8, 9]}, {**OURS, "eos_token_id": [8, 9]},
                {**OURS, "eos_token_id": [3, 8, 9]}, {**OURS, "eos_token_id": [3, 8, 9]}),
    "not the tokenizer's": (tokenizer(None, None, None), OURS, OURS, OURS, OURS),
    "processor": (Tool(tokenizer=tokenizer()), NONE, None, OURS, None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_special_tokens_are_the_tokenizers(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    tool, config, generation, aligned, aligned_generation = CASES[name]
    model = make_model(Config(**config), generation and Config(**generation))
    train(tmp_path, model, tool)
    assert vars(model.config) == aligned
    if generation is not None:
        assert vars(model.generation_config) == aligned_generation
    has_changed = (config, generation) != (aligned, aligned_generation)
    assert ("special tokens differ from the model's" in caplog.text) == has_changed


def test_special_tokens_of_a_model_of_several_are_those_of_its_text(tmp_path: Path) -> None:
    model = make_model(Config(inner=Config(**NONE)))
    train(tmp_path, model, tokenizer())
    assert vars(model.config.inner) == OURS
    assert "pad_token_id" not in vars(model.config)


@pytest.mark.parametrize("tool", [None, Tool()], ids=["none", "of no text"])
def test_what_has_no_special_tokens_changes_nothing(tmp_path: Path, tool: Any) -> None:
    model = make_model(Config(**NONE))
    train(tmp_path, model, tool)
    assert vars(model.config) == NONE


def test_override_decides_about_special_tokens(tmp_path: Path) -> None:
    class Own(Trainer):
        def _align_special_tokens(self) -> None:
            self.model.config.pad_token_id = 7

    model = make_model(Config(**NONE))
    args = make_arguments(tmp_path, max_steps=1)
    Own(model, args, train_dataset=make_rows(), processing_class=tokenizer()).train()
    assert vars(model.config) == {**NONE, "pad_token_id": 7}


class Collate:
    """A collator with a tokenizer."""

    tokenizer = Tool("the collator's")

    def __call__(self, samples: Any) -> Any:
        return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize(("tool", "saved"), [(None, "the collator's"), (Tool("given"), "given")], ids=["none", "given"])
def test_tokenizer_of_the_collator_is_saved_if_none_was_given(tmp_path: Path, tool: Any, saved: str) -> None:
    trainer = train(tmp_path, Net(), tool, data_collator=Collate())
    trainer.save_model(str(tmp_path / "end"))
    for folder in (tmp_path / "checkpoint-1", tmp_path / "end"):
        assert json.loads((folder / "tokenizer.json").read_text()) == saved
