"""Features that change numbers: a run on a mesh logs, predicts and saves what one process does, or refuses."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.distributed import launch
from support.resuming import StopAt
from support.tiny import make_arguments, make_texts
from torch import nn

from hftrain import (
    EMA,
    SWA,
    ChunkedCrossEntropy,
    Freeze,
    GradientAccumulationScheduler,
    GradientClipping,
    HFTrainError,
    SavePolicy,
    SpikeGuard,
    Trainer,
    TrainerCallback,
    layerwise_groups,
    set_seed,
)
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

LOGGED = ("loss", "learning_rate", "grad_norm", "eval_loss", "spike_loss", "skipped_steps", "nonfinite_losses", "step")


def make_model(dtype: torch.dtype) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=64, n_positions=16, **rates)
    return GPT2LMHeadModel(config).to(dtype)


def make_classifier(dtype: torch.dtype) -> Any:
    """Return a model that accepts the item count without reading it, and has a buffer in its first stage."""
    from transformers import GPT2ForSequenceClassification

    config = make_model(dtype).config
    config.update({"num_labels": 64, "pad_token_id": 0})
    model = GPT2ForSequenceClassification(config).to(dtype)
    model.transformer.wte.register_buffer("seen", torch.zeros(1))
    return model


def make_t5(dtype: torch.dtype) -> Any:
    """Return an encoder-decoder whose attention has a bias of each head."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)).to(dtype)


class Pictures(nn.Module):
    """A list of convolutions that change the shape, as the stages of ConvNeXt do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.norm, self.head = nn.Embedding(64, 4), nn.GroupNorm(2, 8), nn.Linear(8, 64)
        self.stages = nn.ModuleList([nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, (3, 2))])
        self.pipeline_parts = ["words", "stages", "norm", "head"]
        self.to(dtype)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(input_ids).unsqueeze(1)
        for stage in self.stages:
            x = stage(x).tanh()
        logits = self.head(self.norm(x).mean((2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def classes(rows: Any) -> dict[str, torch.Tensor]:
    return {
        "input_ids": torch.stack([row["input_ids"] for row in rows]),
        "labels": torch.stack([row["labels"][-1] for row in rows]),
    }


class Spoil(TrainerCallback):
    """Fill the gradients of the last block in one backward pass, or its weights after one step."""

    def __init__(self, value: float, *, grads_at: int = 0, weights_at: int = 0) -> None:
        self.value, self.grads_at, self.weights_at, self.num_passes = value, grads_at, weights_at, 0

    def wrap_stepper(self, stepper: Any, *, model: nn.Module, **_: Any) -> Any:
        def backward(loss: torch.Tensor, **options: Any) -> None:
            stepper.backward(loss, **options)
            self.num_passes += 1
            if self.num_passes == self.grads_at:
                self._fill([parameter.grad for parameter in self._of_last_block(model)])

        return replace(stepper, backward=backward)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == self.weights_at:
            self._fill(self._of_last_block(model))

    def _of_last_block(self, model: nn.Module) -> list[nn.Parameter]:
        return [each for name, each in model.named_parameters() if ".h.1." in name and not each.is_meta]

    @torch.no_grad()
    def _fill(self, tensors: Any) -> None:
        for tensor in tensors:
            if tensor is not None:
                (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(self.value)


class Steep(Trainer):
    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().compute_loss(model, inputs, *args, **kwargs)
        return found * 1e4 if model.training and self.state.global_step == 3 else found


class Weighted(Trainer):
    """The documented override with weights of classes."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        weights = torch.linspace(0.5, 2, logits.shape[-1], dtype=logits.dtype)
        loss = nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), weight=weights)
        return (loss, outputs) if return_outputs else loss


class Layered(Trainer):
    def create_optimizer(self, model: Any = None) -> Any:
        layers = {"layers": ["transformer.wte", "transformer.h.*"], "decay": 0.5}
        self.optimizer = torch.optim.AdamW(layerwise_groups(self.model, lr=1e-2, weight_decay=0.01, **layers))
        return self.optimizer


def sum_over_items(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
    goals = labels[:, 1:].flatten()
    loss = nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1), goals, reduction="sum")
    return loss / (goals.ne(-100).sum() if num_items_in_batch is None else num_items_in_batch)


STYLES = {**dict.fromkeys(("q", "k", "v", "relative_attention_bias", "wi"), "colwise"), "o": "rowwise", "wo": "rowwise"}
T5 = {
    "encoder.block.*.layer.0.SelfAttention": "q k v o",
    "encoder.block.0.layer.0.SelfAttention": "relative_attention_bias",
    "encoder.block.*.layer.1.DenseReluDense": "wi wo",
    "decoder.block.*.layer.0.SelfAttention": "q k v o",
    "decoder.block.0.layer.0.SelfAttention": "relative_attention_bias",
    "decoder.block.*.layer.1.EncDecAttention": "q k v o",
}
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
FP16: dict[str, Any] = {"fp16": True, "dtype": torch.float32, "optim": "sgd"}
LOWER = ["transformer.h.0", "transformer.wte", "transformer.wpe"]
PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "average": lambda: {"callbacks": [EMA(0.5)], "resumes_at": 2, **SAVES},
    "averages of steps": lambda: {"callbacks": [SWA(1, every=1)]},
    "group clipping": lambda: {"callbacks": [GradientClipping("group", 0.5)], "max_grad_norm": 0.0},
    "unfreezing": lambda: {"callbacks": [Freeze({"transformer.h.0": 1, "transformer.wpe": 2})]},
    "rates of layers": lambda: {"kind": Layered},
    "spike": lambda: {"kind": Steep, "callbacks": [SpikeGuard("skip", rolling_interval_length=3)], "max_steps": 4},
    "rewind": lambda: {
        "kind": Steep, "callbacks": [SpikeGuard("rewind", rolling_interval_length=3)], "max_steps": 5, **SAVES,
    },
    "restore": lambda: {
        "save_policy": SavePolicy(on_nonfinite="restore"), "callbacks": [Spoil(torch.nan, weights_at=2)], **SAVES,
    },
    "stop": lambda: {
        "save_policy": SavePolicy(on_nonfinite="stop"), "callbacks": [Spoil(torch.nan, weights_at=2)], **SAVES,
    },
    "overflow": lambda: {"callbacks": [Spoil(torch.inf, grads_at=2)], **FP16},
    "overflow, unclipped": lambda: {"callbacks": [Spoil(torch.inf, grads_at=2)], "max_grad_norm": 0.0, **FP16},
    "overflow, frozen": lambda: {"callbacks": [Spoil(torch.inf, grads_at=2), Freeze(LOWER)], **FP16},
    "bf16": lambda: {"bf16": True, "dtype": torch.float32, "optim": "sgd", "gradient_accumulation_steps": 2},
    "smoothing": lambda: {"label_smoothing_factor": 0.1, "gradient_checkpointing": True},
    "chunked": lambda: {"callbacks": [ChunkedCrossEntropy(chunk_size=5)], "gradient_accumulation_steps": 3},
    "accumulation": lambda: {
        "callbacks": [GradientAccumulationScheduler({0: 1, 2: 2})], "gradient_accumulation_steps": 2,
    },
    "loss function": lambda: {"compute_loss_func": sum_over_items, "gradient_accumulation_steps": 2},
    "classes": lambda: {"model": make_classifier, "data_collator": classes, "gradient_accumulation_steps": 2},
    "weights of classes": lambda: {"kind": Weighted, "gradient_accumulation_steps": 2},
    "schedule by evaluations": lambda: {
        "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "eval_loss", "eval_strategy": "steps",
        "lr_scheduler_kwargs": {"patience": 0}, "eval_steps": 1, "learning_rate": 0.3,
    },
    "noise": lambda: {"neftune_noise_alpha": 5.0},
    "pictures": lambda: {"model": Pictures, "data_collator": classes},
    "encoder-decoder": lambda: {
        "model": make_t5, "plan": {f"{home}.{x}": STYLES[x] for home, names in T5.items() for x in names.split()},
    },
}  # fmt: skip
PARTS = ("callbacks", "compute_loss_func", "data_collator", "save_policy")
REFUSED = {
    ("tp", "pictures"): "nothing says which of its modules are split",
    ("cp", "pictures"): "Pictures has 0 lists of layers",
    ("cp", "encoder-decoder"): "Its decoder attends to a second sequence",
    ("tp_cp", "encoder-decoder"): "Its decoder attends to a second sequence",
    ("pp", "encoder-decoder"): "Each layer of its decoder needs what the encoder computes",
    ("pp", "chunked"): "Only the last stage of a pipeline has its head and its labels",
    ("tp", "chunked"): "Ranks share its head or its tokens",
}


SIZES: dict[str, dict[str, int]] = {"fsdp_tp": {"tp_size": 2}, "fsdp_pp": {"pp_size": 2}, "tp_cp": {"tp_size": 2}}


def make_trainer(folder: Path, name: str, plan: str, *more: TrainerCallback) -> Any:
    set_seed(7)
    options = PLANS[plan]()
    options.pop("resumes_at", None)
    kind, dtype = options.pop("kind", Trainer), options.pop("dtype", torch.float64)
    model, shares = options.pop("model", make_model)(dtype), options.pop("plan", None)
    parts = {part: options.pop(part) for part in PARTS if part in options}
    parts["callbacks"] = [*parts.get("callbacks", ()), *more]
    sizes = {**SIZES.get(name, {}), **({"plan": shares} if "tp" in name else {})}
    strategy: Any = "single" if name == "single" else create_strategy(name, use_cpu=True, **sizes)
    settings = {"max_steps": 3, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 3} | options
    if name in ("fsdp_tp", "fsdp_pp"):
        settings["per_device_train_batch_size"] //= strategy.data.world_size
    args, rows = make_arguments(folder, **settings), make_texts()
    return kind(model, args, train_dataset=rows, eval_dataset=rows[:7], strategy=strategy, **parts)


def run(folder: Path, name: str, plan: str) -> dict[str, Any]:
    gc.collect()  # a former Trainer's meshes keep their connections
    stop_at = PLANS[plan]().get("resumes_at")
    if stop_at:
        trainer = make_trainer(folder, name, plan, StopAt(stop_at))
        trainer.train()
        trainer.strategy.close()
    trainer, error = make_trainer(folder, name, plan), ""
    try:
        trainer.train(resume_from_checkpoint=bool(stop_at))
    except HFTrainError as raised:
        error = str(raised)
    logs = [[line[key] for key in LOGGED if key in line] for line in trainer.state.log_history]
    logits = [] if error else trainer.predict(make_texts()[:7]).predictions
    found = [] if error else (logits[0] if isinstance(logits, tuple) else logits).flatten()[::97].tolist()
    weights = trainer.strategy.model_state(trainer.model_wrapped) if not error else {}
    trainer.strategy.close()
    return {
        "error": error,
        "numbers": [*(number for line in logs for number in line), *found],
        "weights": {key: value.flatten()[::7].tolist() for key, value in weights.items()},
    }


def everything(folder: str, name: str) -> dict[str, Any]:
    return {plan: run(Path(folder) / plan, name, plan) for plan in PLANS}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return everything(str(tmp_path_factory.mktemp("alone")), "single")


LONG = [pytest.param(name, marks=[pytest.mark.guarantees, pytest.mark.timeout(2000)]) for name in SIZES]


@pytest.mark.parametrize("name", ["tp", "cp", "pp", *LONG])
def test_features_give_the_numbers_of_one_process(tmp_path: Path, alone: dict[str, Any], name: str) -> None:
    options: Any = {"kwargs": {"folder": str(tmp_path), "name": name}, "num_processes": 4 if name in SIZES else 2}
    ended = launch(everything, tmp_path, forks=True, timeout_s=1800, **options)
    assert ended.returncode == 0, ended.output
    first, second = ended.results[:2]
    for plan, own in alone.items():
        assert first[plan]["numbers"] == second[plan]["numbers"], plan
        refused = REFUSED.get((name, plan)) or REFUSED.get((name.removeprefix("fsdp_").removesuffix("_cp"), plan))
        if refused:
            assert refused in first[plan]["error"]
            continue
        assert first[plan]["error"] == own["error"], plan
        rel = 1e-2 if plan == "bf16" else 1e-3 if plan.startswith("overflow") else 1e-6 if name in SIZES else 1e-7
        if plan == "weights of classes" and name.startswith("fsdp"):
            continue  # the mean of the data ranks' means, as without a mesh
        if plan != "noise":  # ranks draw other numbers than one process
            assert first[plan]["numbers"] == pytest.approx(own["numbers"], rel=rel, abs=rel, nan_ok=True), plan
            for key, values in own["weights"].items():
                assert first[plan]["weights"][key] == pytest.approx(values, rel=rel, abs=1e-2 * rel), (plan, key)
