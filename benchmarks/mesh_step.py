"""Measure a training step of a small Llama whose layers two processes of one machine share (`tp`), against its peers.

    OMP_NUM_THREADS=1 python benchmarks/mesh_step.py    # starts the processes itself; --help lists the options

Everybody trains the same weights on the same batches in float32, with AdamW, clipping and a linear schedule, over gloo.
"plain" is the best loop by hand: torch's `parallelize_module` with the model's own plan, one exchange for the norm, and
fused AdamW; "plain-again" is the same once more, so its ratio shows the noise. "transformers-loop" reads the model with
`distributed_config=`, and has the rest of the plain loop; "transformers", "accelerate" and "lightning" bring their
own loop. In each round each one trains some steps, in another order; the ratio is the median of the
ratios to the plain loop's median step of the same round. Before that, each one takes three steps in float64, and its
clipped gradients are compared with those of one process. Whoever cannot run is listed with the error.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from _contenders import ARGUMENTS, LEARNING_RATE, WEIGHT_DECAY, InOrder, InOrderTrainer, collate
from overhead import keep_memory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from hftrain import TrainingArguments

NUM_PROCESSES = 2
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
WARM_UP = 3
EXACT_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama and its batches."""

    width: int
    depth: int
    vocabulary: int
    batch_size: int
    length: int


SIZES = {
    "tiny": Size(width=64, depth=2, vocabulary=256, batch_size=2, length=32),
    "small": Size(width=256, depth=4, vocabulary=2048, batch_size=4, length=64),
    "medium": Size(width=512, depth=4, vocabulary=4096, batch_size=4, length=128),
}


class InDouble(TorchFunctionMode):
    """Compute in float64 what the model computes in float32 whatever it was cast to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        swap = {torch.float32: torch.float64}
        args = [swap.get(x, x) if isinstance(x, torch.dtype) else x for x in args]
        kwargs = {name: swap.get(x, x) if isinstance(x, torch.dtype) else x for name, x in (kwargs or {}).items()}
        return func(*args, **kwargs)


class Llama(LlamaForCausalLM):
    """The model; it tells when it is entered."""

    entered: list[float]
    clock: Callable[[], float]

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> CausalLMOutput:
        self.entered.append(self.clock())
        with InDouble() if self.dtype == torch.float64 else contextlib.nullcontext():
            logits = super().forward(input_ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


@dataclass(kw_only=True)
class Job:
    """What a contender trains: `num_steps` batches, beginning with the model of a folder."""

    size: Size
    folder: str
    num_steps: int
    dtype: torch.dtype = torch.float32
    clock: Callable[[], float] = time.perf_counter
    entered: list[float] = field(default_factory=list)
    model: Any = None

    def read(self, **options: Any) -> Llama:
        self.model = Llama.from_pretrained(self.folder, dtype=self.dtype, **options)
        self.model.entered, self.model.clock = self.entered, self.clock
        return self.model.train()

    def samples(self) -> list[dict[str, torch.Tensor]]:
        shape = self.num_steps * self.size.batch_size, self.size.length
        ids = torch.randint(self.size.vocabulary, shape, generator=torch.Generator().manual_seed(0))
        return [{"input_ids": row, "labels": row} for row in ids]

    def loader(self) -> Any:
        return torch.utils.data.DataLoader(self.samples(), batch_size=self.size.batch_size, collate_fn=collate)  # type: ignore[arg-type]

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return fused AdamW; it takes no group of DTensors and others."""
        parameters, groups = list(model.parameters()), []
        for is_split in (False, True):
            own = [p for p in parameters if isinstance(p, DTensor) is is_split]
            groups.append({"params": [p for p in own if p.dim() > 1], "weight_decay": WEIGHT_DECAY})
            groups.append({"params": [p for p in own if p.dim() == 1], "weight_decay": 0.0})
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=LEARNING_RATE, fused=True)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: max(0.0, (self.num_steps - step) / self.num_steps)
        )

    def arguments(self) -> dict[str, Any]:
        options = {"max_steps": self.num_steps, "per_device_train_batch_size": self.size.batch_size}
        return {**ARGUMENTS, **options, "optim": "adamw_torch_fused"}


def shared(model: nn.Module) -> nn.Module:
    """Share out a model's layers as its own plan says, with torch's styles. Mutates it."""
    styles: dict[str, Any] = {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    }
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"model.{name}": style for name, style in model.config.base_model_tp_plan.items()} | Llama._tp_plan
    return parallelize_module(model, mesh, {name: styles[style]() for name, style in plan.items()})


def clip(parameters: Sequence[nn.Parameter]) -> None:
    """Clip the norm of all gradients to 1 with one exchange."""
    parts, whole = [], []
    for p in parameters:
        is_part = isinstance(p.grad, DTensor) and not p.grad.placements[-1].is_replicate()
        (parts if is_part else whole).append(p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad)
    total = torch.stack(torch._foreach_norm(parts)).square().sum()
    dist.all_reduce(total)
    norm = (total + torch.stack(torch._foreach_norm(whole)).square().sum()).sqrt()  # type: ignore[arg-type]
    torch._foreach_mul_(parts + whole, (1.0 / (norm + 1e-6)).clamp(max=1.0))  # type: ignore[operator]


def loop(job: Job, model: Any, clip: Callable[[Sequence[nn.Parameter]], Any]) -> None:
    parameters = list(model.parameters())
    optimizer = job.optimizer(model)
    schedule = job.schedule(optimizer)
    for batch in job.loader():
        model(**batch).loss.backward()
        clip(parameters)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def run_one_process(job: Job) -> None:
    loop(job, job.read(), lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0))


def run_plain(job: Job) -> None:
    loop(job, shared(job.read()), clip)


def run_hftrain(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, **job.arguments())
        InOrderTrainer(job.read(), arguments, data_collator=collate, train_dataset=job.samples(), strategy="tp").train()


def read_shared(job: Job) -> Llama:
    from transformers.distributed import DistributedConfig

    return job.read(distributed_config=DistributedConfig(tp_size=dist.get_world_size()))


def run_transformers_loop(job: Job) -> None:
    loop(job, read_shared(job), clip)


def run_transformers(job: Job) -> None:
    from accelerate.parallelism_config import ParallelismConfig

    class InOrderTrainer(InOrder, transformers.Trainer):
        pass

    with tempfile.TemporaryDirectory() as folder:
        ranks = ParallelismConfig(tp_size=dist.get_world_size())
        arguments = transformers.TrainingArguments(folder, parallelism_config=ranks, **job.arguments())
        InOrderTrainer(read_shared(job), arguments, data_collator=collate, train_dataset=job.samples()).train()


def run_accelerate(job: Job) -> None:
    from accelerate import Accelerator
    from accelerate.parallelism_config import ParallelismConfig

    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=dist.get_world_size()))
    model: Any = read_shared(job)
    optimizer = job.optimizer(model)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, job.loader(), job.schedule(optimizer))
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def run_lightning(job: Job) -> None:
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = job.read()

        def configure_model(self) -> None:
            shared(self.model)

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch).loss

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            clip(list(self.model.parameters()))  # its own clipping is refused with this strategy

        def configure_optimizers(self) -> Any:
            optimizer = job.optimizer(self.model)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": job.schedule(optimizer), "interval": "step"},
            }

    size = dist.get_world_size()
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=size)
    trainer = lightning.Trainer(
        barebones=True, accelerator="cpu", devices=size, strategy=strategy, max_steps=job.num_steps,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Module(), job.loader())


CONTENDERS: dict[str, Callable[[Job], None]] = {
    "plain": run_plain,
    "plain-again": run_plain,
    "hftrain": run_hftrain,
    "transformers-loop": run_transformers_loop,
    "transformers": run_transformers,
    "accelerate": run_accelerate,
    "lightning": run_lightning,
}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what contenders print and warn out of the report, and let none find another's singletons."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def gradients(run: Callable[[Job], None], job: Job) -> list[dict[str, torch.Tensor]]:
    """Return the clipped gradients of each step, put together from all ranks."""
    found: list[dict[str, torch.Tensor]] = []

    def note(*_: Any) -> None:
        grads = {name: p.grad for name, p in job.model.named_parameters() if p.grad is not None}
        found.append({k: (g.full_tensor() if isinstance(g, DTensor) else g).detach().clone() for k, g in grads.items()})

    handle = register_optimizer_step_post_hook(note)
    try:
        with quiet():
            run(job)
    finally:
        handle.remove()
    return found


def largest_difference(found: Sequence[dict[str, torch.Tensor]], expected: Sequence[dict[str, torch.Tensor]]) -> float:
    """Return the largest difference on any rank, relative to the largest gradient of the step."""
    if [step.keys() for step in found] != [step.keys() for step in expected]:
        raise AssertionError(f"{len(found)} steps with other gradients than the {len(expected)} of one process.")
    worst = torch.zeros((), dtype=torch.float64)
    for ours, theirs in zip(found, expected, strict=True):
        largest = max(grad.abs().max() for grad in theirs.values())
        for name, grad in theirs.items():
            worst = torch.maximum(worst, ((ours[name] - grad).abs().max() / largest).double())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table: medians, and quartiles over rounds."""

    contender: str
    step_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    difference: float


def measure(options: argparse.Namespace, folder: str) -> tuple[list[Result], dict[str, str]]:
    """Compare the contenders; returns also the errors of those that cannot run."""
    size, failed, differences = SIZES[options.size], {}, {}
    exact = {"size": size, "folder": folder, "num_steps": EXACT_STEPS, "dtype": torch.float64}
    expected = gradients(run_one_process, Job(**exact))
    for name in options.contenders:
        if name in ("accelerate", "lightning") and find_spec(name) is None:
            failed[name] = "not installed"
            continue
        try:
            differences[name] = largest_difference(gradients(CONTENDERS[name], Job(**exact)), expected)
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    medians: dict[str, list[float]] = {name: [] for name in differences}
    for number in range(options.rounds):
        for name in random.Random(number).sample(list(medians), len(medians)):
            job = Job(size=size, folder=folder, num_steps=WARM_UP + options.steps + 1, clock=CLOCKS[options.clock])
            with quiet():
                CONTENDERS[name](job)
            dist.barrier()
            steps = [after - before for before, after in zip(job.entered, job.entered[1:], strict=False)]
            medians[name].append(statistics.median(steps[WARM_UP:]))
    results = []
    for name, own in medians.items():
        ratios = [mine / plain for mine, plain in zip(own, medians["plain"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        results.append(
            Result(
                contender=name,
                step_ms=statistics.median(own) * 1e3,
                ratio=statistics.median(ratios),
                ratio_quartiles=(low, high),
                difference=differences[name],
            )
        )
    return results, failed


def report(results: Sequence[Result], failed: dict[str, str]) -> str:
    lines = [
        "| contender | ms a step | ratio to plain | quartiles | largest difference of gradients |",
        "|---|---:|---:|---:|---:|",
    ]
    for result in results:
        low, high = result.ratio_quartiles
        cells = (
            f"{result.step_ms:.2f}", f"{result.ratio:.3f}", f"{low:.3f} to {high:.3f}", f"{result.difference:.1e}",
        )  # fmt: skip
        lines.append(f"| {result.contender} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", *(f"{name} could not run: {reason}" for name, reason in failed.items())])


def run_rank(options: argparse.Namespace) -> None:
    """Measure in one of the processes; the first one prints."""
    torch.set_num_threads(1)
    keep_memory()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("lightning").setLevel(logging.ERROR)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    size = SIZES[options.size]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as own:
        folders = [own] * NUM_PROCESSES
        dist.all_gather_object(folders, own)
        config = LlamaConfig(
            vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.depth, num_attention_heads=8,
            intermediate_size=size.width * 8 // 3 // 16 * 16, max_position_embeddings=size.length,
            tie_word_embeddings=False,
        )  # fmt: skip
        Llama(config).save_pretrained(own)  # writes on the first rank only
        dist.barrier()
        results, failed = measure(options, folders[0])
        dist.barrier()
    if dist.get_rank() == 0:
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        print(f"{versions}, {options.size}, {options.clock} clock\n")
        print(report(results, failed))
        if options.json:
            text = json.dumps([asdict(result) for result in results], indent=2)
            options.json.write_text(text + "\n", encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the processes, or be one of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rounds", type=int, default=7, help="how often each one starts again")
    parser.add_argument("--steps", type=int, default=20, help="how many steps of each are measured in a round")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: of all threads, for a busy machine")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    options = parser.parse_args()
    options.contenders = ["plain", *(name for name in options.contenders if name != "plain")]
    if "RANK" in os.environ:
        run_rank(options)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_PROCESSES)]
    ended = subprocess.run([sys.executable, *launcher, *sys.argv], check=False)
    sys.exit(ended.returncode)


if __name__ == "__main__":
    main()
