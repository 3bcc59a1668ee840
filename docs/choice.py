"""Write what `hftrain plan` computes for two models into docs/strategy_tables.md: ``python docs/choice.py``.

A table stands between ``<!-- computed: MODEL -->`` and ``<!-- end of computed -->``.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import torch

from hftrain import Trainer, TrainingArguments
from hftrain.cli.plan import read_model, weightless
from hftrain.strategies.mesh.proposal import Candidate, candidates

PAGE = Path(__file__).resolve().parent / "strategy_tables.md"
PLACE = re.compile(r"(?P<start><!-- computed: (?P<name>\w+) -->\n).*?(?P<end><!-- end of computed -->)", re.DOTALL)
MEMORY, MACHINE, LENGTH = 80e9, 8, 4096
# The shapes of Llama 3.2 1B and of Llama 3.1 70B: hidden and inner width, layers, heads.
MODELS = {"1B": (2048, 8192, 16, 32), "70B": (8192, 28672, 80, 64)}
COLUMNS = ("GPUs", "strategy", "batch", "slower", "total", "inside", "between")
# What follows is hardly ever the choice.
BEST = 4


def fill(text: str, names: tuple[str, ...] = tuple(MODELS)) -> str:
    """Return a page's text with the tables of some models rewritten."""

    def found(place: re.Match[str]) -> str:
        return place["start"] + table(place["name"]) + place["end"] if place["name"] in names else place[0]

    return PLACE.sub(found, text)


def table(name: str) -> str:
    """Lay out the best strategies on 1, 8 and 64 GPUs, and what those that do not fit need at least."""
    with tempfile.TemporaryDirectory() as folder, weightless():
        model = read_model(make_trainer(folder, *MODELS[name]))
    rows = []
    for gpus in (1, 8, 64):
        fits, rejected = candidates(model, gpus, MACHINE, MEMORY)
        best: dict[str, list[str]] = {}
        for each in fits:
            best.setdefault(each.strategy.removesuffix("_offload"), row(each))
        needs = {key: float(reason.split()[1]) for key, reason in rejected.items() if reason.startswith("needs ")}
        for key in sorted(needs, key=needs.__getitem__):
            cells = [f"`{key.partition(' (')[0]}`", *["-"] * 2, f"needs {shown(needs[key])}", "-", "-"]
            best.setdefault(cells[0].strip("`"), cells)
        rows += [[str(gpus), *best[key]] for key in [*best][:BEST]]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows))


def row(each: Candidate) -> list[str]:
    """Return the cells of a strategy that fits, in gigabytes."""
    options = {key: value for key, value in each.options.items() if key != "num_micro_batches"}
    name = " ".join([f"`{each.strategy}`", *(f"`{key}={value}`" for key, value in options.items())])
    sizes = (each.device, each.inside, each.between)
    batch = f"{each.micro_batch} x {each.accumulation}"
    return [name, batch, f"{each.cost[1]:.0%}", *(shown(size / 1e9) for size in sizes)]


def shown(size: float) -> str:
    """Return three digits of a number, or all before its point."""
    return f"{size:,.0f}" if size >= 100 else f"{size:.3g}"


def make_trainer(folder: str, hidden: int, inner: int, layers: int, heads: int) -> Trainer:
    """Build a Llama in bf16 with AdamW, whose batch is one sequence for each GPU."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=hidden == 2048, max_position_embeddings=LENGTH,
    )  # fmt: skip
    ids = torch.zeros(LENGTH, dtype=torch.long)
    args = TrainingArguments(folder, bf16=True, use_cpu=True, report_to="none", per_device_train_batch_size=1)
    return Trainer(transformers.LlamaForCausalLM(config), args, train_dataset=[{"input_ids": ids, "labels": ids}] * 8)


if __name__ == "__main__":
    PAGE.write_text(fill(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
