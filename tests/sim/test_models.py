"""Models of transformers, adapters and what large models need, next to the CPU's numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hub_models import collate, losses_of, make_model, make_rows, run_options
from support.two_devices import numbers, seed_once, weights

import hftrain
from hftrain import Trainer, TrainingArguments, default_data_collator, pack_dataset, set_seed

pytestmark = [
    pytest.mark.sim,
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]
pytest.importorskip("transformers")


def eager(name: str) -> Any:
    """Make a model whose attention is written out; torch's own takes other kernels on an accelerator."""
    return make_model(name, attn_implementation="eager")


def trained(
    folder: Path,
    name: str,
    *,
    use_cpu: bool,
    make: Any = eager,
    kind: Any = Trainer,
    callbacks: Any = (),
    rows: Any = None,
    collator: Any = collate,
    **options: Any,
) -> Any:
    arguments = hftrain.Seq2SeqTrainingArguments if kind is hftrain.Seq2SeqTrainer else TrainingArguments
    model = make(name)
    set_seed(0)
    rows = make_rows(name, 16) if rows is None else rows
    trainer = kind(
        model,
        arguments(str(folder), **run_options(**{"use_cpu": use_cpu, "num_train_epochs": 1, **options})),
        train_dataset=rows,
        eval_dataset=make_rows(name, 16)[:8],
        data_collator=collator,
        callbacks=[make_one() for make_one in callbacks],
    )
    trainer.train()
    return trainer


def same(folder: Path, name: str, **options: Any) -> None:
    expected = trained(folder / "cpu", name, use_cpu=True, **options)
    found = trained(folder / "sim", name, use_cpu=False, **options)
    assert next(found.model.parameters()).device.type == "sim"
    assert all(map(torch.equal, weights(expected), weights(found)))
    assert numbers(expected) == numbers(found)


@pytest.mark.parametrize("name", ["bert", "llama", "t5"])
def test_models_train_as_on_the_cpu(tmp_path: Path, name: str) -> None:
    same(tmp_path, name, eval_strategy="steps", eval_steps=2)


def test_torchs_attention_takes_other_kernels(tmp_path: Path) -> None:
    """The composed attention of a device that torch does not know rounds elsewhere than the CPU's fused one."""
    one, other = (
        trained(tmp_path / str(use_cpu), "llama", use_cpu=use_cpu, make=make_model) for use_cpu in (True, False)
    )
    assert losses_of(one.state.log_history) == pytest.approx(losses_of(other.state.log_history), abs=1e-4)


CASES: dict[str, dict[str, Any]] = {
    "checkpointing": {"gradient_checkpointing": True},
    "accumulation": {"gradient_accumulation_steps": 2},
    "noise": {"neftune_noise_alpha": 5.0, "callbacks": [seed_once]},
    "chunked loss": {"callbacks": [lambda: hftrain.ChunkedCrossEntropy(chunk_size=5)]},
}


@pytest.mark.parametrize("case", CASES)
def test_what_large_models_need(tmp_path: Path, case: str) -> None:
    same(tmp_path, "llama", **CASES[case])


def test_documents_are_packed_as_on_the_cpu(tmp_path: Path) -> None:
    documents = [{"input_ids": row["input_ids"][: 2 + number % 5]} for number, row in enumerate(make_rows("llama", 40))]
    packed = pack_dataset(documents, 12)
    same(tmp_path, "llama", rows=packed, collator=default_data_collator)


def test_adapters_train_as_on_the_cpu(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(name: str) -> Any:
        config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", target_modules=["q_proj"])
        return peft.get_peft_model(eager(name), config)

    same(tmp_path, "llama", make=adapted, save_strategy="steps", save_steps=2)


def test_sequences_are_generated_on_it(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 6}
    one, other = (
        trained(tmp_path / str(use_cpu), "t5", use_cpu=use_cpu, kind=hftrain.Seq2SeqTrainer, **settings)
        for use_cpu in (True, False)
    )
    rows = make_rows("t5", 4, seed=5)
    assert (one.predict(rows).predictions == other.predict(rows).predictions).all()
