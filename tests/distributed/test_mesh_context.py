"""Context parallelism: the whole loss, logits and gradients of one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.meshes import CPU, WORDS, InDouble, Layer, batch, make
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from hftrain import set_seed
from hftrain.core.errors import HFTrainError
from hftrain.core.tree import CACHES
from hftrain.strategies.mesh.context import split_context
from hftrain.task.introspect import forward_parameters

pytestmark = pytest.mark.distributed


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
        if "use_cache" in case:
            model.config.use_cache = case["use_cache"]
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


@pytest.mark.parametrize("kind", ["ulysses", "gather"])
def test_padding_packed_documents_and_labels_on_one_rank(run_distributed: Any, kind: str) -> None:
    cases = [("llama", each) for each in ("left", "right", "ragged", "packed", "blocks")]
    cases += [("gemma3", "packed"), ("mistral", "left"), ("gpt2", "right"), ("bert", "right")]
    found = [{"model": name, "batch": each, "length": 11, "kind": kind, "use_cache": False} for name, each in cases]
    check(run_distributed, 2, found)


def test_heads_that_the_ranks_do_not_divide_gather_their_keys(run_distributed: Any) -> None:
    options = {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1}
    check(run_distributed, 2, [{"model": "llama", "length": 9, "options": options}])


def recompute() -> dict[str, float]:
    """Compare gradients under dropout with and without checkpointing, the forward passes of two lengths pending."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    rates = {"attention_dropout": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    rates |= {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    found = {}
    for name, kind in (("llama", "ulysses"), ("llama", "gather"), ("gpt2", "ulysses"), ("bert", "gather")):
        answers = {}
        for label, options in (("off", None), ("on", {"use_reentrant": False}), ("old", {"use_reentrant": True})):
            model = make(name, **rates).train()
            split_context(model, mesh, kind=kind, device=CPU)
            if options:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            set_seed(5)
            losses = []
            for length in (2, 7, 8):
                inputs = batch("whole", length)
                if name == "bert":
                    inputs["labels"] = torch.tensor([0, 2])
                set_seed(5 + length)
                losses.append(model(**inputs)["loss"])
            torch.autograd.backward(losses)
            answers[label] = [p.grad for p in model.parameters() if p.grad is not None]
            # In step again.
            every = [torch.zeros(1) for _ in range(mesh.size())]
            torch.distributed.all_gather(every, torch.rand(1))
            assert every == every[::-1]
        for label in ("on", "old"):
            assert len(answers[label]) == len(answers["off"])
            pairs = zip(answers["off"], answers[label], strict=True)
            found[f"{name} {kind} {label}"] = max(float((a - b).abs().max()) for a, b in pairs)
    torch.distributed.destroy_process_group()
    return found


def test_recomputed_layers_draw_the_same_numbers(run_distributed: Any) -> None:
    for found in run_distributed(recompute, num_processes=2):
        assert len(found) == 8
        assert {name: value for name, value in found.items() if not value < 1e-15} == {}


def draw() -> dict[str, Any]:
    """Compute with dropout where all positions are alike but for what is dropped; and evaluate and generate."""
    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = make("plain").train()
    for layer in model.layers:
        layer.dropout.p = 0.5
    split_context(model, mesh, layer_classes=["Layer"], device=CPU)
    with InDouble():
        logits = model(torch.ones(1, 8, dtype=torch.long), torch.ones(1, 8, dtype=torch.long))["logits"]
    found: dict[str, Any] = {"apart": float((logits[:, :4] - logits[:, 4:]).abs().max())}
    model = make("llama").eval()
    inputs = batch("left", 9)
    with torch.no_grad(), InDouble():
        expected = model(**inputs)["logits"], model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
        split_context(model, mesh, device=CPU)
        output = model(**inputs)
        found["evaluated"] = float((output["logits"] - expected[0]).abs().max())
        found["cache"] = [name for name, value in output.items() if name in CACHES and value is not None]
        written = model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
        found["generated"] = written.tolist() == expected[1].tolist()
    torch.distributed.destroy_process_group()
    return found


def test_ranks_draw_apart_and_evaluate_and_generate_the_whole(run_distributed: Any) -> None:
    for found in run_distributed(draw, num_processes=2):
        assert found.pop("apart") > 1e-3
        assert found.pop("evaluated") < 1e-12
        assert found == {"cache": [], "generated": True}


class Extra(Layer):
    """A layer that takes what may run along the sequence."""

    def forward(self, x: torch.Tensor, scales: dict[str, Any] | None = None) -> torch.Tensor:
        return super().forward(x)


class Careless(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        summed: torch.Tensor = self.inner(x)[..., :8].cumsum(1)
        return x + summed


class Masking(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x[:, None]
        return x + scaled_dot_product_attention(q, q, q, torch.ones(x.shape[1], x.shape[1]).tril().bool())[:, 0]


class Single(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


class Crossing(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x[:, None]
        return x + scaled_dot_product_attention(q, q[:, :, :2], q[:, :, :2])[:, 0]


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module], *, num_called: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(2))
        self.num_called = num_called

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        for layer in self.layers[: self.num_called]:
            x = layer(x, **options)
        return x


def refuse() -> dict[str, str]:
    import transformers as tf

    torch.distributed.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    said = {}

    def note(name: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except HFTrainError as error:
            said[name] = str(error)

    def run(model: Any, x: torch.Tensor | None = None, *, kind: str = "auto", **options: Any) -> None:
        split_context(model, mesh, layer_classes=[type(model.layers[0]).__name__], kind=kind, device=CPU)
        model(torch.ones(2, 6, 8) if x is None else x, **options)

    run(Stack(Extra), scales={"a": [torch.ones(3)]})
    note("argument", lambda: run(Stack(Extra), scales={"a": [torch.ones(6)]}))
    note("careless", lambda: run(Stack(Careless)))
    note("mask", lambda: run(Stack(Masking)))
    note("cross", lambda: run(Stack(Crossing)))
    note("last", lambda: run(Stack(Layer, num_called=1)))
    note("flat", lambda: run(Stack(Layer), torch.ones(6, 8)))
    note("heads", lambda: run(Stack(Single), kind="ulysses"))
    note("kind", lambda: run(Stack(Layer), kind="ulises"))
    note("conv", lambda: run(Stack(lambda: nn.Conv1d(8, 8, 3))))  # type: ignore[arg-type]
    note("classes", lambda: split_context(Stack(Layer), mesh, layer_classes=["layer"], device=CPU))
    mixed = Stack(Layer)
    mixed.layers.append(Careless())
    note("mixed", lambda: split_context(mixed, mesh, layer_classes=["Layer"], device=CPU))
    wrapped: Any = Stack(Layer)
    wrapped.layers[0].forward = wrapped.layers[0].forward
    note("wrapped", lambda: run(wrapped))
    twice = Stack(Layer)
    run(twice)
    note("twice", lambda: run(twice))
    note("outside", lambda: twice.layers[1](torch.ones(2, 6, 8)))
    tiny: dict[str, Any] = {"vocab_size": WORDS, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    t5 = tf.T5ForConditionalGeneration(tf.T5Config(**tiny))
    note("encoder", lambda: split_context(t5, mesh, device=CPU))
    note("eager", lambda: split_context(make("llama", attn_implementation="eager"), mesh, device=CPU))
    llama = make("llama")
    split_context(llama, mesh, device=CPU)
    ids = torch.ones(1, 6, dtype=torch.long)
    note("states", lambda: llama(ids, output_hidden_states=True))
    cache = tf.DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    name = next(name for name in CACHES if name in forward_parameters(llama))
    note("prefix", lambda: llama.train()(ids, **{name: cache}))
    llama.set_attn_implementation("eager")
    note("later", lambda: llama(ids))
    torch.distributed.destroy_process_group()
    return said


REASONS = {
    "argument": "the layers take 'scales'",
    "careless": "did not call torch.nn.functional.scaled_dot_product_attention",
    "mask": "mask is not one of the whole sequence of 6",
    "cross": "queries and keys are not of one sequence",
    "last": "did not call its last layer",
    "flat": "not [batch, sequence, width]",
    "heads": "2 ranks do not divide 1 heads",
    "kind": "Did you mean 'ulysses'?",
    "conv": "mixes positions other than by attention",
    "classes": "has 0 lists of layers of the classes ['layer']",
    "mixed": "Among them are ['Careless']",
    "wrapped": "wrapped already",
    "twice": "split already",
    "outside": "called outside of its model's forward pass",
    "encoder": "Its decoder attends to a second sequence",
    "eager": "attn_implementation='sdpa'",
    "states": "Cannot use output_hidden_states=True",
    "prefix": "keys and values of earlier positions",
    "later": "attn_implementation='sdpa'",
}


def test_models_that_cannot_be_split_are_refused(run_distributed: Any) -> None:
    for said in run_distributed(refuse, num_processes=2):
        assert said.keys() == REASONS.keys()
        assert {name: text for name, text in said.items() if REASONS[name] not in text} == {}
