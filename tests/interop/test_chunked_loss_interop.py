"""ChunkedCrossEntropy with transformers' causal language models: the same training, with logits where they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from support.hub_models import make_rows, run_options  # noqa: E402

from hftrain import (  # noqa: E402
    ChunkedCrossEntropy,
    ConfigError,
    TaskError,
    TaskModule,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]

SIZES = {"vocab_size": 28, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 16}
GPT2 = {"vocab_size": 28, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16, "bos_token_id": 0}
GPT2 |= {"eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS = ("llama", "llama-tied", "qwen2", "gemma", "phi", "gpt2", "peft")


def make_model(kind: str) -> Any:
    """Build a model; the head of "phi" has a bias, and "gpt2", "gemma" and "llama-tied" have tied ones."""
    set_seed(0)
    if kind == "peft":
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(make_model("llama"), peft.LoraConfig(task_type="CAUSAL_LM", r=4))
    name, _, tied = kind.partition("-")
    options = GPT2 if kind == "gpt2" else {**SIZES, **({"tie_word_embeddings": True} if tied else {})}
    if name in ("gemma", "gemma2"):
        options |= {"num_key_value_heads": 1, "head_dim": 16}
    config = transformers.AutoConfig.for_model(name, **options)
    return transformers.AutoModelForCausalLM.from_config(config)


def plain_loss(logits: Any, labels: Any, vocab_size: int, num_items_in_batch: Any = None, **options: Any) -> Any:
    """Do what transformers' loss does, which rounds to float32, in the model's dtype."""
    labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=-100).flatten()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
    return loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def make_trainer(folder: Path, model: Any, *, chunks: bool, **options: Any) -> Trainer:
    parts = {key: options.pop(key) for key in ("compute_loss_func", "compute_metrics") if key in options}
    settings = {"max_steps": 3, "gradient_accumulation_steps": 3, "optim": "sgd", "learning_rate": 0.1} | options
    return Trainer(
        model,
        TrainingArguments(str(folder), **run_options(**settings)),
        train_dataset=make_rows("llama"),
        eval_dataset=make_rows("llama", 7, seed=2),
        callbacks=[ChunkedCrossEntropy(chunk_size=5)] if chunks else [],
        **parts,
    )


def results(folder: Path, kind: str, *, chunks: bool, double: bool = False, **options: Any) -> Any:
    model = make_model(kind)
    if double:
        model.double()
        if not chunks:
            base = model.get_base_model() if kind == "peft" else model
            base.loss_function = plain_loss
    trainer = make_trainer(folder, model, chunks=chunks, **options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return [model.state_dict(), losses]


# torch's compiler looks at the loss between two of its graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("kind", "options", "tolerance"),
    [
        *((kind, {"double": True}, 1e-12) for kind in KINDS),
        ("llama", {}, 1e-5),
        ("llama", {"bf16": True}, 2e-3),
        ("llama", {"gradient_checkpointing": True}, 1e-5),
        ("llama", {"torch_compile": True, "torch_compile_backend": "aot_eager"}, 1e-5),
    ],
)
def test_weights_and_losses_are_those_of_the_plain_loss(
    tmp_path: Path, kind: str, options: Any, tolerance: float
) -> None:
    plain, chunked = (results(tmp_path, kind, chunks=chunks, **options) for chunks in (False, True))
    torch.testing.assert_close(chunked[0], plain[0], rtol=0, atol=tolerance)
    assert chunked[1] == pytest.approx(plain[1], rel=1e-6 if "double" in options else 1e-4)  # logs are in float32


def test_metrics_and_predictions_have_their_logits(tmp_path: Path) -> None:
    seen = []
    trainer = make_trainer(
        tmp_path,
        make_model("llama"),
        chunks=True,
        eval_strategy="steps",
        eval_steps=1,
        compute_metrics=lambda prediction: seen.append(prediction.predictions.shape) or {},
    )
    head = trainer.model.get_output_embeddings()
    trainer.train()
    assert seen == [(7, 8, 28)] * 3
    assert trainer.predict(make_rows("llama", 3)).predictions.shape == (3, 8, 28)
    # The model is as it was: it computes its loss itself, and returns logits while it trains.
    assert "forward" not in vars(head)
    assert "_loss_function" not in vars(trainer.model)
    assert not {*trainer.model._forward_hooks, *trainer.model._forward_pre_hooks}
    batch = {name: torch.tensor([value]) for name, value in make_rows("llama", 1)[0].items()}
    assert trainer.model.train()(**batch).logits.shape == (1, 8, 28)


class Task(TaskModule):
    def training_step(self, batch: Any) -> Any:
        outputs = self.model(**batch)
        assert not self.training or outputs.logits is None
        return outputs.loss

    def count_items(self, batch: Any) -> Any:
        return (batch["labels"][:, 1:] != -100).sum()


def test_a_task_trains_as_with_the_plain_loss(tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [ChunkedCrossEntropy(chunk_size=5)]):
        model = make_model("llama").double()
        if not callbacks:
            model.loss_function = plain_loss
        args = TrainingArguments(str(tmp_path), **run_options(max_steps=3, gradient_accumulation_steps=3, optim="sgd"))
        task = Task(model) if callbacks else PlainTask(model)
        Trainer(task, args, train_dataset=make_rows("llama"), callbacks=callbacks).train()
        found.append(model.state_dict())
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


class PlainTask(Task):
    def training_step(self, batch: Any) -> Any:
        return self.model(**batch).loss


def other_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    return outputs.logits.sum()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("gemma2", {}, "scales or caps its logits"),
        ("llama", {"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ("llama", {"compute_loss_func": other_loss}, "compute_loss_func"),
    ],
)
def test_losses_that_it_cannot_compute_are_refused(tmp_path: Path, kind: str, options: Any, message: str) -> None:
    trainer = make_trainer(tmp_path, make_model(kind), chunks=True, **options)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    with pytest.raises(TaskError, match=f"(?s){message}.*Leave the callback out"):
        trainer.train()
    torch.testing.assert_close(trainer.model.state_dict(), before, rtol=0, atol=0)
    assert "forward" not in vars(trainer.model.get_output_embeddings())


def test_heads_that_are_no_plain_layers_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["lm_head"])
    model = peft.get_peft_model(make_model("llama"), config)
    with pytest.raises(ConfigError, match=r"(?s)LlamaForCausalLM.*Its head is a Linear, not a plain nn.Linear"):
        make_trainer(tmp_path, model, chunks=True).train()


def test_own_losses_are_refused(tmp_path: Path) -> None:
    model = make_model("llama")
    model.loss_function = plain_loss
    with pytest.raises(ConfigError, match="not the usual one"):
        make_trainer(tmp_path, model, chunks=True).train()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"return_dict": False}, "returns a tuple"), ({"logits_to_keep": 1}, r"tokens of shape \(\d, 1\)")],
)
def test_calls_that_it_cannot_follow_are_refused(tmp_path: Path, options: Any, message: str) -> None:
    class Other(Task):
        def training_step(self, batch: Any) -> Any:
            return self.model(**batch, **options)[0]

    args = TrainingArguments(str(tmp_path), **run_options(max_steps=1))
    callbacks = [ChunkedCrossEntropy()]
    trainer = Trainer(Other(make_model("llama")), args, train_dataset=make_rows("llama"), callbacks=callbacks)
    with pytest.raises(TaskError, match=message):
        trainer.train()


class Look(TrainerCallback):
    """Call the model in evaluation mode, with gradients, between two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, words = kwargs["model"].eval(), torch.arange(5)[None]
        assert model(input_ids=words, labels=words).logits.shape == (1, 5, 28)
        model.train()


def test_a_model_in_evaluation_mode_has_its_logits_between_steps(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_model("llama"), chunks=True)
    trainer.add_callback(Look())
    trainer.train()


@pytest.mark.parametrize("kind", ["op", 1, 2])
def test_selective_checkpoints_keep_the_results_to_the_bit(tmp_path: Path, kind: Any) -> None:
    found = []
    for options in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"selective": kind}}):
        set_seed(0)
        size = {**SIZES, "attention_dropout": 0.2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
        make_trainer(tmp_path, model, chunks=False, **options).train()
        found.append(model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name
