"""Seq2SeqTrainer with transformers' encoder-decoder and decoder models, and its GenerationConfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from support.hub_models import VOCABULARY, make_model, make_rows, make_tokenizer, run_options  # noqa: E402

from hftrain import (  # noqa: E402
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)

pytestmark = pytest.mark.interop


def make_seq2seq(name: str, **options: Any) -> Any:
    """Build a tiny T5, BART or (decoder only) Llama."""
    if name != "bart":
        return make_model(name, **options)
    set_seed(0)
    sizes = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in _BART.items()}
    config = transformers.BartConfig(
        vocab_size=len(VOCABULARY), d_model=32, max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2, dropout=0.0, **sizes, **options,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config)


_BART = {"layers": 1, "attention_heads": 2, "ffn_dim": 32}


def rows_of(num: int = 7) -> list[dict[str, list[int]]]:
    """Return samples of different lengths, without padding."""
    rows = []
    for index, row in enumerate(make_rows("t5", num)):
        length = 3 + index % 5
        labels = [label for label in row["labels"] if label != -100]
        rows.append({"input_ids": row["input_ids"][:length], "attention_mask": [1] * length, "labels": labels})
    return rows


def make_trainer(folder: Path, name: str = "t5", model: Any = None, **options: Any) -> Seq2SeqTrainer:
    parts = {key: options.pop(key) for key in ("compute_metrics", "train_dataset", "eval_dataset") if key in options}
    model = model or make_seq2seq(name)
    tokenizer = make_tokenizer()
    return Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(str(folder), **run_options(predict_with_generate=True, **options)),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        **parts,
    )


def by_hand(model: Any, rows: list[dict[str, list[int]]], width: int, **options: Any) -> list[list[int]]:
    """Generate batch by batch, as the Trainer's arguments say, and pad with 0."""
    collate, found = DataCollatorForSeq2Seq(make_tokenizer()), []
    for start in range(0, len(rows), 4):
        batch = collate([{k: v for k, v in row.items() if k != "labels"} for row in rows[start : start + 4]])
        for tokens in model.eval().generate(**batch, **options).tolist():
            found.append([*tokens, *[0] * (width - len(tokens))])
    return found


@pytest.mark.parametrize("options", [{"max_length": 6}, {"max_length": 9, "num_beams": 2}, {"max_new_tokens": 5}])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_predictions_are_what_the_model_generates(tmp_path: Path, name: str, options: dict[str, int]) -> None:
    model = make_seq2seq(name)
    width = options.get("max_length", 6)
    trainer = make_trainer(tmp_path, model=model)
    output = trainer.predict(rows_of(), **options)
    assert output.predictions.tolist() == by_hand(model, rows_of(), width, **options)
    assert [len(row) for row in output.label_ids] == [max(width, 8)] * 7
    settings = {f"generation_{key}": value for key, value in options.items() if key != "max_new_tokens"}
    if len(settings) == len(options):
        again = make_trainer(tmp_path, model=model, **settings).predict(rows_of())
        assert again.predictions.tolist() == output.predictions.tolist()


def test_decoder_alone_continues_its_prompt(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in make_rows("llama", 5)]
    trainer = make_trainer(tmp_path, "llama")
    output = trainer.predict(rows, max_new_tokens=3)
    assert output.predictions.shape == (5, 11)
    assert output.predictions[:, :8].tolist() == [row["input_ids"] for row in rows]


@pytest.mark.parametrize("form", ["object", "folder", "path", "file"])
def test_generation_config_comes_in_every_form(tmp_path: Path, form: str) -> None:
    config = transformers.GenerationConfig(max_length=6, num_beams=2, pad_token_id=0, decoder_start_token_id=0)
    config.save_pretrained(tmp_path / "config")
    folder = tmp_path / "config"
    given = {"object": config, "folder": str(folder), "path": folder, "file": folder / "generation_config.json"}[form]
    model = make_seq2seq("t5")
    trainer = make_trainer(tmp_path, model=model, generation_config=given)
    assert (model.generation_config.max_length, model.generation_config.num_beams) == (6, 2)
    expected = by_hand(make_seq2seq("t5"), rows_of(), 6, max_length=6, num_beams=2)
    assert trainer.predict(rows_of()).predictions.tolist() == expected
    assert trainer.predict(rows_of(), max_length=4).predictions.shape[1] == 4
    trainer.save_model(str(tmp_path / "model"))
    saved = json.loads((tmp_path / "model/generation_config.json").read_text(encoding="utf-8"))
    assert saved["num_beams"] == 2
