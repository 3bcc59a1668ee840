"""Documents packed in one row train and evaluate as each of them alone does."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

import hftrain  # noqa: E402

pytestmark = pytest.mark.interop

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
KINDS = {
    "LlamaConfig": {},
    "Qwen2Config": {},
    "GemmaConfig": {"head_dim": 8},
    "Gemma3TextConfig": {"head_dim": 8, "sliding_window": 4},
    "MistralConfig": {"sliding_window": 8},
}
DOCUMENTS = [
    {"input_ids": torch.randint(3, 64, (num,), generator=torch.Generator().manual_seed(num)).tolist()}
    for num in (9, 5, 12, 7, 3, 11, 8, 6)
]


def make_model(kind="LlamaConfig", attention="sdpa"):
    config = getattr(transformers, kind)(**SIZES, **KINDS[kind], num_key_value_heads=2)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.dim() > 1 else 1)  # otherwise attention hardly matters
    return model


def losses_alone(model):
    """Return the sum of the losses of each document alone, and the number of tokens that they predict."""
    model.eval()
    batches = [torch.tensor([row["input_ids"]]) for row in DOCUMENTS]
    sums = [model(ids, labels=ids, use_cache=False).loss * (ids.shape[1] - 1) for ids in batches]
    return sum(sums), sum(ids.shape[1] - 1 for ids in batches)


def make_trainer(folder, model, collator, *, arguments=hftrain.TrainingArguments, **options):
    sizes = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 4, "max_steps": 1, "logging_steps": 1}
    plain = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0}
    optimizer = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant"}
    args = arguments(str(folder), **sizes, **plain, **{**optimizer, **options})
    return hftrain.Trainer(model, args, data_collator=collator, train_dataset=DOCUMENTS, eval_dataset=DOCUMENTS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_packed_documents_train_and_evaluate_as_each_alone(tmp_path, kind, attention):
    model, same = make_model(kind, attention), make_model(kind, attention)
    trainer = make_trainer(tmp_path, model, hftrain.DataCollatorWithFlattening())
    total, num = losses_alone(same)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(total.detach()) / num, rel=1e-5)
    assert model.config.use_cache
    (total / num).backward()
    torch.optim.SGD(same.parameters(), lr=1.0).step()
    trainer.train()
    for ours, expected in zip(model.parameters(), same.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    total, _ = losses_alone(same)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(total.detach()) / num, rel=1e-4)
    assert model.config.use_cache


class Derived(transformers.DataCollatorWithFlattening):
    """A user's collator that packs."""


@pytest.mark.parametrize("collator", [hftrain.DataCollatorWithFlattening, Derived])
@pytest.mark.parametrize(
    ("arguments", "option"),
    [(hftrain.TrainingArguments, "use_cache"), (hftrain.Seq2SeqTrainingArguments, "predict_with_generate")],
)
def test_packing_with_a_cache_is_refused(tmp_path, collator, arguments, option):
    with pytest.raises(hftrain.ConfigError, match=f"Cannot use {option}=True with .*documents"):
        make_trainer(tmp_path, make_model(), collator(), arguments=arguments, **{option: True})


def test_a_model_without_positions_is_named(tmp_path, recwarn):
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM(config)
    make_trainer(tmp_path, model, hftrain.DataCollatorWithFlattening(return_flash_attn_kwargs=True))
    make_trainer(tmp_path, make_model(), hftrain.DataCollatorWithFlattening())
    assert not recwarn.list
    with pytest.warns(UserWarning, match="BloomForCausalLM"):
        make_trainer(tmp_path, model, hftrain.DataCollatorWithFlattening())
