"""Context parallelism: the whole loss, logits and gradients of one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hftrain import set_seed
from hftrain.strategies.mesh.context import split_context

pytestmark = pytest.mark.distributed

WORDS = 31
CPU = torch.device("cpu")


class InDouble(TorchFunctionMode):
    """Compute in float64 what models compute in float32 whatever they were cast to."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        swap = {torch.float32: torch.float64}
        args = [swap.get(x, x) if isinstance(x, torch.dtype) else x for x in args]
        kwargs = {k: swap.get(x, x) if isinstance(x, torch.dtype) else x for k, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Layer(nn.Module):
    """A layer that calls attention in its own forward pass, without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inner(x).unflatten(-1, (3, 4, 2)).permute(2, 0, 3, 1, 4)
        seen: torch.Tensor = self.dropout(scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))
        return x + seen


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.layers = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.layers(self.words(input_ids)))
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def make(name: str, **options: Any) -> Any:
    """Build a tiny model in float64."""
    import transformers as tf

    sizes: dict[str, Any] = {
        "vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 16, "max_position_embeddings": 32,
        "attention_dropout": 0.0, "pad_token_id": 0, "attn_implementation": "sdpa",
    }  # fmt: skip
    gpt = {"n_embd": 16, "n_head": 4, "n_layer": 2, "n_positions": 32}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    calm = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    set_seed(0)
    if name == "plain":
        model: Any = Plain()
    elif name in ("llama", "lora"):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**sizes, **options}))
    elif name == "qwen3":
        model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**{**sizes, **options}))
    elif name == "mistral":
        model = tf.MistralForCausalLM(tf.MistralConfig(**{**sizes, "sliding_window": 3, **options}))
    elif name == "gemma3":
        more = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
        model = tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**{**sizes, **more, **options}))
    elif name == "mixtral":
        model = tf.MixtralForCausalLM(
            tf.MixtralConfig(**{**sizes, "num_local_experts": 4, "experts_implementation": "eager", **options})
        )
    elif name == "gpt2":
        model = tf.GPT2LMHeadModel(tf.GPT2Config(**{**sizes, **gpt, **calm, **options}))
    else:
        model = tf.BertForSequenceClassification(tf.BertConfig(**{**sizes, **still, "num_labels": 3, **options}))
    if name == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False))
    return model.double()


def batch(kind: str, length: int) -> dict[str, torch.Tensor]:
    """Return two samples: whole, padded left or right, with labels at the end only, or with packed documents."""
    set_seed(1)
    ids = torch.randint(1, WORDS, (2, length))
    found = {"input_ids": ids, "labels": ids.clone()}
    if kind in ("left", "right"):
        mask = torch.ones_like(ids)
        mask[0, :3] = 0
        found["attention_mask"] = mask if kind == "left" else mask.flip(1)
        found["labels"][found["attention_mask"] == 0] = -100
    elif kind == "ragged":
        found["labels"][:, : length - 2] = -100
        found["labels"][1, -1] = -100
    elif kind == "packed":
        found["position_ids"] = torch.cat([torch.arange(5), torch.arange(length - 5)]).expand(2, -1)
    return found


def compute(model: nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Return loss, logits and the gradients' mean over the ranks."""
    model.zero_grad()
    with InDouble():
        output = model(**inputs)
        output["loss"].backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(gradient)
            gradient /= torch.distributed.get_world_size()
    return float(output["loss"].detach()), output["logits"].detach(), gradients


def difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two results, relative for the gradients."""
    assert found[2].keys() == expected[2].keys()
    assert max(float(value.abs().max()) for value in found[2].values()) > 1e-3
    # Gradients that are zero but for rounding have no scale of their own.
    scale = max(float(value.abs().max()) for value in expected[2].values())
    gradients = [float((value - expected[2][name]).abs().max()) / scale for name, value in found[2].items()]
    return max(abs(float(found[0] - expected[0])), float((found[1] - expected[1]).abs().max()), *gradients)


def compare(cases: list[dict[str, Any]]) -> list[float]:
    """Compare each case with one process: model, batch, length, kind, checkpointing and the model's options."""
    answers = []
    worlds = []
    for case in cases:
        model = make(case["model"], **case.get("options", {})).train()
        inputs = batch(case.get("batch", "whole"), case["length"])
        if case["model"] == "bert":
            inputs["labels"] = torch.tensor([0, 2])
        answers.append((model, inputs, compute(copy.deepcopy(model), inputs)))
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for case, (model, inputs, expected) in zip(cases, answers, strict=True):
        classes = ["Layer"] if case["model"] == "plain" else None
        split_context(model, mesh, kind=case.get("kind", "auto"), layer_classes=classes, device=CPU)
        if case.get("checkpoints"):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=case["checkpoints"])
        worlds.append(difference(compute(model, inputs), expected))
    torch.distributed.destroy_process_group()
    return worlds


MODELS = ("plain", "llama", "qwen3", "mistral", "gemma3", "mixtral", "gpt2", "bert", "lora")


def check(run_distributed: Any, num_processes: int, cases: list[dict[str, Any]]) -> None:
    for found in run_distributed(compare, num_processes=num_processes, cases=cases):
        assert {str(case): value for case, value in zip(cases, found, strict=True) if not value < 1e-12} == {}


@pytest.mark.parametrize("kind", ["ulysses", "gather"])
def test_models_compute_what_one_process_does(run_distributed: Any, kind: str) -> None:
    check(run_distributed, 2, [{"model": name, "length": 11, "kind": kind} for name in MODELS])


@pytest.mark.parametrize("kind", ["ulysses", "gather"])
def test_more_ranks_than_heads_of_keys_and_ranks_with_no_position(run_distributed: Any, kind: str) -> None:
    names = ("llama", "gpt2", "bert")
    # Five positions are two for two ranks, one for the third and none for the fourth; of three each has all.
    check(run_distributed, 4, [{"model": m, "length": n, "kind": kind} for m in names for n in (8, 5, 3)])
