"""Tiny models in float64 on meshes, compared with one process."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import torch
from support.architectures import tiny
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hftrain import set_seed
from hftrain.core.errors import HFTrainError
from hftrain.core.types import PrecisionPolicy
from hftrain.strategies.registry import create_strategy

# The meshes, the models, and what is refused: the tables of docs/meshes.md are made of it, and the tests prove it.
PROOFS: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))

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
    elif name == "blocks":
        model = Blocks(**options)
    elif name in ("llama", "lora"):
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**{**sizes, **options}))
    elif name == "qwen3":
        model = tf.Qwen3ForCausalLM(tf.Qwen3Config(**{**sizes, **options}))
    elif name == "gemma2":
        model = tf.Gemma2ForCausalLM(
            tf.Gemma2Config(**{**sizes, "sliding_window": 3, "attn_implementation": "eager", **options})
        )
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
    elif name.startswith("lm:"):
        model = tiny(name[3:], **options)
    else:
        model = tf.BertForSequenceClassification(tf.BertConfig(**{**sizes, **still, "num_labels": 3, **options}))
    if name == "lora":
        import peft

        settings = {"r": 2, "init_lora_weights": False, "lora_dropout": options.get("lora_dropout", 0.0)}
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", **settings))
    with torch.no_grad():  # norms and biases that do something
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-1, 1)
            if "lora_" in key:  # larger ones amplify rounding a hundredfold with each step
                parameter.mul_(0.1)
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
    elif kind == "blocks":
        document = (torch.arange(length) >= 5).long()
        block = (document[:, None] == document) & torch.ones(length, length).tril().bool()
        found["attention_mask"] = block.expand(2, 1, -1, -1)
    return found


class Block(nn.Module):
    """Attention and an MLP, as others write them: they know nothing of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attention(self.norm(hidden_states))
        mixed: torch.Tensor = hidden_states + self.mlp(hidden_states)
        return mixed


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)
        self.outer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inner(x).unflatten(-1, (3, -1, 4)).permute(2, 0, 3, 1, 4)
        seen: torch.Tensor = self.outer(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return seen


class Blocks(nn.Module):
    """A plain module, whose plan is a dict."""

    plan: ClassVar = {
        "words": "embedding_rowwise",
        "blocks.*.attention.inner": "packed_qkv_colwise",
        "blocks.*.attention.outer": "rowwise",
        "blocks.*.mlp.0": "colwise",
        "blocks.*.mlp.2": "rowwise",
        "head": "colwise_gather_output",
    }

    def __init__(self, *, vocab_size: int = WORDS, tie_word_embeddings: bool = False, **_: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab_size, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(16, vocab_size, bias=False)
        if tie_word_embeddings:
            self.head.weight = self.words.weight

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any, attention_mask: Any = None
    ) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return {"loss": loss / num_items_in_batch, "logits": logits}


def micro_batches(case: dict[str, Any], step: int) -> list[dict[str, torch.Tensor]]:
    """Return the micro-batches of one step, of four samples each.

    In "ragged" ones, half of the samples of the second micro-batch have no label, and the others' end early.
    """
    words, length = case.get("vocab_size", 32), case.get("length", 12)
    generator = torch.Generator().manual_seed(step)
    found = []
    for index in range(case.get("accumulation", 1)):
        ids = torch.randint(1, words - 2, (4, length), generator=generator)
        labels = ids.clone()
        inputs = {"input_ids": ids, "labels": labels}
        if case.get("labels", "ragged") == "ragged":
            labels[:2, :7] = -100
            labels[3, 2:] = -100
            if index == 1:
                labels[:2] = -100
        if case.get("padding") is not None:
            mask = torch.ones_like(ids)
            mask[1, -3:] = mask[2, -1:] = 0
            ids[mask == 0] = case["padding"]
            labels[mask == 0] = -100
            inputs["attention_mask"] = mask
        found.append(inputs)
    return found


def _build(case: dict[str, Any]) -> Any:
    options: dict[str, Any] = {"vocab_size": case.get("vocab_size", 32), "pad_token_id": case.get("padding", 0)}
    if "tied" in case:
        options["tie_word_embeddings"] = case["tied"]
    model = make(case["model"], **options, **case.get("model_options", {})).train()
    if case.get("checkpoints"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=case["checkpoints"])
    return model.to(getattr(torch, case.get("dtype", "float64")))


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach()


class OneProcess:
    """The steps of one process: losses, gradients, norms, weights and AdamW's state."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.model = _build(case)
        self.optimizer = _adamw(self.model)
        self.steps: list[tuple[float, dict[str, torch.Tensor], torch.Tensor]] = []
        for step in range(case.get("steps", 5)):
            batches, total = micro_batches(case, step), 0.0
            items = sum((each["labels"][:, 1:] != -100).sum() for each in batches)
            for each in batches:
                loss = self.model(**each, num_items_in_batch=items)["loss"]
                loss.backward()
                total += loss.item()
            grads = {name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), case.get("clip") or torch.inf)
            self.steps.append((total, grads, norm))
            self.optimizer.step()
            self.optimizer.zero_grad()


def on_mesh(case: dict[str, Any]) -> dict[str, float]:
    """Train on the mesh of a case; return the largest differences from one process, by kind."""
    mesh = PROOFS["meshes"][case["mesh"]]
    options = {**mesh.get("options", {}), **case.get("options", {})}
    if case["model"] == "blocks" and mesh.get("shares_layers"):
        options |= {"plan": Blocks.plan}
    if case["model"] == "blocks" and mesh["strategy"] not in ("single", "ddp"):
        options |= {"layer_classes": ["Block"]}
    dtype = getattr(torch, case.get("dtype", "float64"))
    policy = PrecisionPolicy(name="exact", param_dtype=dtype, compute_dtype=dtype, reduce_dtype=dtype)
    found = dict.fromkeys(("loss", "gradients", "norm", "weights", "state"), 0.0)
    with ExitStack() as stack:
        if dtype == torch.float64:
            stack.enter_context(InDouble())
        one = OneProcess(case)
        strategy = create_strategy(mesh["strategy"], use_cpu=True, **options)
        strategy.launch()
        stack.callback(strategy.close)
        model, optimizer = strategy.setup(_build(case), _adamw, policy)
        assert optimizer is not None
        for step, expected in enumerate(one.steps):
            _compare_step(strategy, model, micro_batches(case, step), expected, found, case)
            optimizer.step()
            optimizer.zero_grad()
        for name, value, other in _pairs(strategy.unwrap(model), one.model):
            _note(found, "weights", _whole(value), other, name)
            state, known = optimizer.state.get(value, {}), one.optimizer.state.get(other, {})
            assert state.keys() == known.keys(), name
            for key in state:
                _note(found, "state", _whole(state[key]), known[key], name)
    return found


def _compare_step(strategy: Any, model: Any, batches: Any, expected: Any, found: Any, case: dict[str, Any]) -> None:
    size, total = strategy.data.world_size, torch.zeros((), dtype=torch.float64)
    items = sum((each["labels"][:, 1:] != -100).sum() for each in batches) / size
    rows = slice(strategy.data.rank * 4 // size, (strategy.data.rank + 1) * 4 // size)
    for index, each in enumerate(batches):
        own = {name: value[rows] for name, value in each.items()}
        with ExitStack() as stack:
            if index < len(batches) - 1:
                stack.enter_context(strategy.no_sync(model))
            loss = model(**own, num_items_in_batch=items)["loss"]
            loss.backward()
        total = total + loss.detach()
    _note(found, "loss", strategy.data.reduce(total) / size, torch.tensor(expected[0], dtype=torch.float64), "loss")
    own = dict(strategy.unwrap(model).named_parameters())
    present = {name for name, parameter in own.items() if not parameter.is_meta}
    assert {name for name in present if own[name].grad is not None} == expected[1].keys() & present
    for name in sorted(present & expected[1].keys()):  # in one order on all ranks
        assert own[name].grad is not None
        _note(found, "gradients", _whole(own[name].grad), expected[1][name], name)
    norm = strategy.clip_grad_norm(model.parameters(), case.get("clip") or torch.inf)
    _note(found, "norm", norm, expected[2], "norm")


def _pairs(model: nn.Module, other: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    others = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        if not parameter.is_meta:
            yield name, parameter, others[name]


def _note(found: dict[str, float], kind: str, value: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert value.shape == expected.shape, (name, value.shape, expected.shape)
    expected = expected.detach().double()
    # Relative to what is larger than 1.
    gap = float((value.double() - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    found[kind] = max(found[kind], gap) if gap == gap else gap


def prove(cases: list[dict[str, Any]]) -> list[dict[str, float] | str]:
    """Compare each case with one process; return the differences, or what a refusal says."""
    if torch.distributed.is_available() and int(PROOFS["meshes"][cases[0]["mesh"]]["processes"]) > 1:
        torch.distributed.init_process_group("gloo")
    answers: list[dict[str, float] | str] = []
    for case in cases:
        try:
            answers.append(on_mesh(case))
        except HFTrainError as error:
            answers.append(str(error))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return answers
