"""The figures of `hftrain plan` against what real ranks hold after a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hftrain import Trainer, TrainingArguments, set_seed
from hftrain.cli.plan import read_model
from hftrain.core.parameters import weightless
from hftrain.strategies.mesh.cutting import divide
from hftrain.strategies.mesh.layout import Layout
from hftrain.strategies.mesh.proposal import Candidate, measure, trace
from hftrain.strategies.registry import create_strategy

# PEFT reads the older name.
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")]

WAYS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "fsdp": (Layout(dp_shard=4), {}),
    "tp": (Layout(tp=4), {"tp_size": 4}),
    "fsdp_tp": (Layout(dp_shard=2, tp=2), {"tp_size": 2}),
    "hsdp_tp": (Layout(dp_replicate=2, tp=2), {"tp_size": 2, "dp_replicate": 2}),
    "fsdp_cp": (Layout(dp_shard=2, cp=2), {"cp_size": 2}),
    "fsdp_pp": (Layout(dp_shard=2, pp=2), {"pp_size": 2}),
}
KINDS = ("llama", "qwen3", "gpt2", "lora")


def make_trainer(kind: str, output: str, **options: Any) -> Trainer:
    import transformers as tf

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                             "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 64}  # fmt: skip
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    set_seed(0)
    if kind == "qwen3":
        model: Any = tf.Qwen3ForCausalLM(tf.Qwen3Config(**sizes))
    elif kind == "gpt2":
        model = tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=64, n_embd=32, n_head=4, n_layer=2, n_positions=64, **still)
        )
    else:
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
    if kind == "lora":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", r=4))
    rows = [{"input_ids": torch.arange(48), "labels": torch.arange(48)} for _ in range(16)]
    args = TrainingArguments(
        output, use_cpu=True, report_to="none", disable_tqdm=True, max_steps=1, per_device_train_batch_size=2,
        save_strategy="no",
    )  # fmt: skip
    return Trainer(model, args, train_dataset=rows, **options)


def plan(kind: str, output: str, way: str) -> Candidate:
    with weightless():
        found = read_model(make_trainer(kind, output))
    layout, options = WAYS[way]
    cut = divide(found.module, layout.pp) if layout.pp > 1 else None
    given: Any = {"layout": layout, "saved": trace(found, layout.tp), "cut": cut, "setting": (2, False, False)}
    stages = [measure(found, way, options, machine=8, stage=stage, **given) for stage in range(layout.pp)]
    return max(stages, key=lambda each: each.device)


def hold(cases: list[tuple[str, str]], output: str) -> list[tuple[int, int, int, int]]:
    return [held(kind, way, f"{output}/{kind}-{way}") for kind, way in cases]


def held(kind: str, way: str, output: str) -> tuple[int, int, int, int]:
    """Return the bytes of parameters, gradients, state and activations that a rank holds after a step."""
    trainer = make_trainer(kind, output, strategy=create_strategy(way, use_cpu=True, **WAYS[way][1]))
    gradients, kept = [0], {}

    def local(tensors: Any) -> int:
        parts = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
        return sum(each.nbytes for each in parts if each is not None and not each.is_meta)

    from hftrain import TrainerCallback

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients[0] = local(p.grad for p in kwargs["model"].parameters())

    trainer.add_callback(Look())

    def storage_of(tensor: Any) -> Any:
        return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = storage_of(tensor)
        # Among these are the gathered ones of layers that compute now.
        if storage.data_ptr() not in {storage_of(each).data_ptr() for each in trainer.model.parameters()}:
            kept[storage.data_ptr()] = storage
        return tensor

    compute = trainer.compute_loss

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            return compute(model, *args, **kwargs)

    trainer.compute_loss = watched  # type: ignore[method-assign]
    trainer.train()
    assert trainer.optimizer is not None
    parameters = local(trainer.model_wrapped.parameters())
    states = [v for state in trainer.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return parameters, gradients[0], local(states), sum(each.nbytes() for each in kept.values())


EVERY_DAY = [("llama", "fsdp_tp"), ("qwen3", "tp"), ("gpt2", "hsdp_tp"), ("lora", "fsdp_cp"), ("llama", "fsdp_pp")]
ALL = [(kind, way) for kind in KINDS for way in WAYS]


@pytest.mark.parametrize("cases", [EVERY_DAY, pytest.param(ALL, marks=pytest.mark.guarantees)], ids=["few", "all"])
def test_figures_are_what_the_ranks_hold(run_distributed: Any, tmp_path: Any, cases: list[tuple[str, str]]) -> None:
    planned = [plan(kind, str(tmp_path / "plan"), way) for kind, way in cases]
    wrong = {}
    found = run_distributed(hold, num_processes=4, cases=cases, output=str(tmp_path / "run"), timeout_s=1200)
    for case, each, ranks in zip(cases, planned, zip(*found, strict=True), strict=True):
        measured = max(ranks, key=sum)  # the stage that needs most, in a pipeline
        figures = [each.parameters, each.gradients, each.optimizer, each.activations]
        if figures != pytest.approx(measured, rel=0.1):
            wrong[case] = [*zip(figures, measured, strict=True)]
    assert wrong == {}
