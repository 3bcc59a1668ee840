"""Rows of packed documents, with the models and attention implementations of transformers that run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from support.resuming import check_resumes
from support.stateful import Placed
from torch.utils.data import ConcatDataset

transformers = pytest.importorskip("transformers")

import hftrain  # noqa: E402

pytestmark = pytest.mark.interop

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {"intermediate_size": 64},
    "Qwen3": {"intermediate_size": 64, "head_dim": 8, "num_key_value_heads": 2},
    "Gemma3Text": {"intermediate_size": 64, "head_dim": 8, "sliding_window": 4},
    "GPT2": {"bos_token_id": 0, "eos_token_id": 0},
    "Mixtral": {"intermediate_size": 64, "num_key_value_heads": 2},
}
JOINING: dict[str, dict[str, Any]] = {
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mamba": {},
}
# Since transformers 5.24 it restarts where the positions do.
(KINDS if Version(transformers.__version__) >= Version("5.24") else JOINING)["Falcon"] = {}
DOCUMENTS = [
    {"input_ids": torch.randint(3, 64, (num,), generator=torch.Generator().manual_seed(num)).tolist()}
    for num in (9, 5, 12, 7, 3, 11, 8, 6, 15, 2, 4, 10)
]
LENGTH = 16
ATTENTIONS = ["eager", "sdpa", "flex_attention"]
# Flex attention is compiled for each.
PAIRS = [
    pytest.param(kind, attention, marks=[pytest.mark.slow] * (attention == "flex_attention" and kind != "Llama"))
    for kind in KINDS
    for attention in ATTENTIONS
]


def make_model(kind: str = "Llama", attention: str | None = "sdpa", sharp: float = 4.0) -> Any:
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **KINDS.get(kind, {}), **JOINING.get(kind, {})})
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    except ValueError as error:
        pytest.skip(str(error))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(sharp if parameter.dim() > 1 else 1)  # otherwise attention hardly matters
    return model


def make_trainer(folder: Path, model: Any, *callbacks: Any, data: Any = None, **options: Any) -> hftrain.Trainer:
    plain = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "logging_steps": 1}
    args = hftrain.TrainingArguments(str(folder), **{**plain, "per_device_train_batch_size": 2, **options})
    data = hftrain.pack_dataset(DOCUMENTS, LENGTH) if data is None else data
    return hftrain.Trainer(model, args, train_dataset=data, callbacks=list(callbacks))


def test_every_attention_that_runs_on_a_cpu_is_tried() -> None:
    names = {name for name in transformers.AttentionInterface().valid_keys() if not name.startswith(("flash", "paged"))}
    assert names | {"eager"} == set(ATTENTIONS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, where flex attention is compiled
@pytest.mark.parametrize("packing", ["bfd", "wrapped"])
@pytest.mark.parametrize(("kind", "attention"), PAIRS)
def test_document_does_not_see_its_neighbours(kind: str, attention: str, packing: str) -> None:
    model = make_model(kind, attention).eval()
    model.config.use_cache = False  # as a Trainer does
    rows = hftrain.pack_dataset(DOCUMENTS, LENGTH, packing=packing)
    batch = hftrain.default_data_collator([rows[0], rows[1]])
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 1
    changed = {name: values.clone() for name, values in batch.items()}
    changed["input_ids"][0, : starts[1]] = 66 - changed["input_ids"][0, : starts[1]].clamp(min=3)
    with torch.no_grad():
        logits, others = (model(**each).logits for each in (batch, changed))
    assert not torch.equal(logits[0, : starts[1]], others[0, : starts[1]])
    if kind == "Mixtral":  # its experts multiply other batches, which rounds differently
        torch.testing.assert_close(logits[0, starts[1] :], others[0, starts[1] :], rtol=1e-4, atol=1e-5)
    else:
        assert torch.equal(logits[0, starts[1] :], others[0, starts[1] :])
        assert torch.equal(logits[1], others[1])


@pytest.mark.parametrize("kind", list(KINDS))
def test_models_that_keep_documents_apart_are_accepted(tmp_path: Path, kind: str) -> None:
    model = make_model(kind, sharp=1).train()
    make_trainer(tmp_path, model, data=ConcatDataset([hftrain.pack_dataset(DOCUMENTS, LENGTH)]))
    found = torch.rand(1)
    assert all(module.training for module in model.modules())
    make_trainer(tmp_path, model, data=DOCUMENTS)  # seeds as well
    assert torch.equal(torch.rand(1), found)


@pytest.mark.parametrize("kind", list(JOINING))
def test_models_that_join_documents_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(hftrain.ConfigError, match="document"):
        make_trainer(tmp_path, make_model(kind, None))


@pytest.mark.parametrize("option", [{"use_cache": True}, {"kind": "padding"}, {"kind": "language modelling"}])
def test_what_joins_documents_is_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    class Tokenizer:
        pad_token = mask_token = "a"
        pad_token_id = 0

        def pad(self, *args: Any, **options: Any) -> None: ...

    collators = {
        "padding": lambda: hftrain.DataCollatorWithPadding(Tokenizer()),
        "language modelling": lambda: hftrain.DataCollatorForLanguageModeling(Tokenizer(), mlm=False),
    }
    kind = option.get("kind")
    args = hftrain.TrainingArguments(str(tmp_path), report_to="none", use_cpu=True, **({} if kind else option))
    data = hftrain.pack_dataset(DOCUMENTS, LENGTH)
    with pytest.raises(hftrain.ConfigError, match="pack_dataset"):
        hftrain.Trainer(make_model(), args, collators[kind]() if kind else None, train_dataset=data)


def test_flash_attention_is_refused_with_several_rows(tmp_path: Path) -> None:
    model = make_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(hftrain.ConfigError, match="one row"):
        make_trainer(tmp_path, model)
    make_trainer(tmp_path, model, per_device_train_batch_size=1, per_device_eval_batch_size=1)


def test_rows_train_as_documents_do_alone_and_as_with_transformers(tmp_path: Path) -> None:
    sgd = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_grad_norm": 0, "max_steps": 1}
    alone, ours, theirs = make_model(), make_model(), make_model()
    batches = [torch.tensor([row["input_ids"]]) for row in DOCUMENTS]
    total = sum(alone(ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1) for ids in batches)
    (total / sum(ids.shape[1] - 1 for ids in batches)).backward()
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    rows = hftrain.pack_dataset(DOCUMENTS, LENGTH)
    make_trainer(tmp_path, ours, per_device_train_batch_size=len(rows), **sgd).train()
    theirs.config.use_cache = False
    args = transformers.TrainingArguments(
        str(tmp_path), report_to="none", use_cpu=True, per_device_train_batch_size=len(rows), **sgd
    )
    transformers.Trainer(theirs, args, train_dataset=rows, data_collator=transformers.default_data_collator).train()
    for expected, *found in zip(alone.parameters(), ours.parameters(), theirs.parameters(), strict=True):
        for each in found:
            torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("workers", "is_stream", "packing"),
    [(0, False, "bfd"), (2, True, "bfd"), (2, False, "wrapped"), (0, True, "wrapped")],
)
def test_packed_run_resumes_exactly_twice(tmp_path: Path, workers: int, is_stream: bool, packing: str) -> None:
    def trainer(folder: Path, *callbacks: Any) -> Any:
        source = Placed(DOCUMENTS) if is_stream else DOCUMENTS
        return make_trainer(
            folder,
            make_model(),
            *callbacks,
            data=hftrain.pack_dataset(source, LENGTH, packing=packing, buffer_size=4),
            dataloader_num_workers=workers,
            per_device_train_batch_size=1,
            save_strategy="steps",
            save_steps=100,
            max_steps=20,
        )

    check_resumes(trainer, tmp_path, [2, 9, 15])
