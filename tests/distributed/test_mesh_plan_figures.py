"""The figures of `hftrain plan` against what real ranks hold after a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hftrain import Trainer, TrainingArguments, set_seed
from hftrain.cli.plan import read_model, weightless
from hftrain.strategies.mesh.layout import Layout
from hftrain.strategies.mesh.proposal import Candidate, measure, share, trace
from hftrain.strategies.registry import create_strategy

pytestmark = pytest.mark.distributed

WAYS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "fsdp": (Layout(dp_shard=4), {}),
    "tp": (Layout(tp=4), {"tp_size": 4}),
    "fsdp_tp": (Layout(dp_shard=2, tp=2), {"tp_size": 2}),
}


def make_trainer(kind: str, output: str, **options: Any) -> Trainer:
    import transformers as tf

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 4, "intermediate_size": 64}  # fmt: skip
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    set_seed(0)
    model = (
        tf.LlamaForCausalLM(tf.LlamaConfig(**sizes))
        if kind == "llama"
        else tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=64, n_embd=32, n_head=4, n_layer=2, n_positions=64, **still))
    )
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
    shared = share(found, layout.tp)
    return measure(found, way, layout, options, shared, trace(found, shared), 8, 2, False, False)


def hold(kind: str, way: str, output: str) -> tuple[int, int, int, int]:
    """Return the bytes of parameters, gradients, state and activations that a rank holds, and its part of them."""
    trainer = make_trainer(kind, output, strategy=create_strategy(way, use_cpu=True, **WAYS[way][1]))
    gradients, kept = [0], {}

    def local(tensors: Any) -> int:
        parts = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
        return sum(each.nbytes for each in parts if each is not None)

    from hftrain import TrainerCallback

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            gradients[0] = local(p.grad for p in kwargs["model"].parameters())

    trainer.add_callback(Look())

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    compute = trainer.compute_loss

    def watched(model: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = compute(model, *args, **kwargs)
        for each in model.parameters():
            part = each.to_local() if hasattr(each, "to_local") else each
            kept.pop(part.untyped_storage().data_ptr(), None)
        return found

    trainer.compute_loss = watched  # type: ignore[method-assign]
    trainer.train()
    assert trainer.optimizer is not None
    parameters = local(trainer.model_wrapped.parameters())
    states = [v for state in trainer.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return parameters, gradients[0], local(states), sum(each.nbytes() for each in kept.values())


@pytest.mark.parametrize(("kind", "way"), [("llama", "fsdp_tp")])
def test_figures_are_what_the_ranks_hold(run_distributed: Any, tmp_path: Any, kind: str, way: str) -> None:
    planned = plan(kind, str(tmp_path / "plan"), way)
    found = run_distributed(hold, num_processes=4, kind=kind, way=way, output=str(tmp_path / "run"))
    parameters, gradients, optimizer, activations = (max(each) for each in zip(*found, strict=True))
    assert (planned.parameters, planned.gradients) == (parameters, gradients)
    assert planned.optimizer == pytest.approx(optimizer, rel=0.1)
    if way != "fsdp":  # whose hooks also see the gathered parameters
        assert planned.activations == pytest.approx(activations, rel=0.1)
