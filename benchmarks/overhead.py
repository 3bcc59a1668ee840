"""Measure what a training framework adds to an optimizer step of a plain PyTorch loop, on one CPU core.

    python benchmarks/overhead.py                            # the table, a few minutes
    python benchmarks/overhead.py --sizes 1ms --repeats 1    # one model size, once
    python benchmarks/overhead.py --frames hftrain-task      # the Python functions that make the difference
    python benchmarks/overhead.py --write                    # put the figures into the pages that show them

Everybody does the same work on the same batches: float32, AdamW (decay on matrices only; the table says in which of
torch's forms), gradients clipped to norm 1 (torch's `clip_grad_norm_`, which is foreach), linear schedule, the data
read in order through a torch DataLoader with one collate function; all must end with the same parameters. Nobody logs,
evaluates, saves or shows a progress bar:

- plain: the best loop that we know, `run_plain`, with fused AdamW; "plain-again" is the same loop once more, so its
  ratio shows the noise; "plain-loop" leaves the form to torch, which takes a loop over parameters on a CPU.
- hftrain-task, hftrain-module, transformers: the documented arguments in `ARGUMENTS`, the same for all three, with the
  defaults for the rest (the form of AdamW; a NaN filter over the summed loss; unused columns removed where the model is
  a plain module).
- accelerate: the loop of its quick tour: `prepare` everything, `accelerator.backward`, `accelerator.clip_grad_norm_`.
- lightning: `Trainer(barebones=True)`, its own setting for measuring overhead.
- accelerate-fused, lightning-fused: given `AdamW(fused=True)`; without, they train with torch's loop.

A step is timed from one entry into the model's `forward` to the next, the same place for everybody; that leaves
start-up out. The contenders run at the same time in threads of one process, of which one at a time may go on: each
takes a turn of some steps, then hands over inside `forward`, while no clock runs. So a disturbance longer than a
round hits all alike. A turn counts with its median step, a contender with the median of its ratios to the plain loop's
turn of the same round. All start anew some times, in another order, because neighbours and a model's place in memory
matter too. Python calls are counted apart by a profile hook ("call" events: functions written in Python, not those
written in C) and do not vary.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import json
import platform
import random
import statistics
import sys
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from _contenders import CONTENDERS, SIZES, Job, Size, is_installed, make_job, write_between
from torch.optim.optimizer import register_optimizer_step_pre_hook

NUM_WARMUP = 10
NUM_WARMUP_TURNS = 3

# From malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

Contenders = Mapping[str, Callable[[Job], None]]

# The contenders in README.md's table; all with fused AdamW.
_SHOWN = ("hftrain-task", "hftrain-module", "accelerate-fused", "transformers", "lightning-fused")

CLOCKS = {"cpu": time.thread_time, "wall": time.perf_counter}


class Runner(threading.Thread):
    """One contender in a ring of them, of which the first may run; also the probe of its model."""

    def __init__(
        self, name: str, size: Size, *, ring: deque[Runner], clock: Callable[[], float], contenders: Contenders
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._contend = contenders[name]
        self.job = make_job(size, self.note_entry, num_steps=size.num_turns * size.steps_per_turn)
        self.gate = threading.Semaphore(0)
        self.error: Exception | None = None
        self.medians: list[float] = []
        self._ring = ring
        self._clock = clock
        self._num_ticks = size.steps_per_turn + 1
        self._ticks: list[float] = []

    def run(self) -> None:
        self.gate.acquire()
        torch.set_num_threads(1)
        try:
            self._contend(self.job)
        except Exception as error:
            self.error = error
        self._ring.popleft()
        if self._ring:
            self._ring[0].gate.release()

    def note_entry(self) -> None:
        self._ticks.append(self._clock())
        if len(self._ticks) == self._num_ticks:
            self.medians.append(statistics.median(later - earlier for earlier, later in pairwise(self._ticks)))
            self._ring.rotate(-1)
            self._ring[0].gate.release()
            self.gate.acquire()
            self._ticks = [self._clock()]


class CallCounter:
    """A probe that counts the Python functions entered between the end of the warm-up and the last step."""

    def __init__(self, size: Size, num_steps: int) -> None:
        self.job = make_job(size, self.note_entry, num_steps=min(NUM_WARMUP, num_steps) + num_steps)
        self.num_steps = num_steps
        self.num_warmup = min(NUM_WARMUP, num_steps)
        self.calls: Counter[CodeType] = Counter()
        self.form = "loop"
        self._num_entries = 0
        self._hook = register_optimizer_step_pre_hook(self._note_form)

    def _note_form(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        forms = [name for name in ("fused", "foreach") if optimizer.param_groups[0].get(name)]
        self.form = forms[0] if forms else "loop"

    def note_entry(self) -> None:
        self._num_entries += 1
        if self._num_entries == self.num_warmup + 1:
            self._hook.remove()
            sys.setprofile(self._note)
        elif self._num_entries == self.num_warmup + 1 + self.num_steps:
            sys.setprofile(None)

    def _note(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1

    def per_step(self) -> float:
        return sum(self.calls.values()) / self.num_steps


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what contenders print and warn out of the report."""
    gc.collect()
    silence = io.StringIO()
    with contextlib.redirect_stdout(silence), contextlib.redirect_stderr(silence), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def keep_memory() -> None:
    """Make malloc keep what it is given back, for the rest of the process.

    Whether it hands a freed gradient to the system, and takes it back page by page in the next step, depends on what
    lies beside it in memory: up to a third of a large step's time, by luck.
    """
    if platform.libc_ver()[0] == "glibc":
        malloc = ctypes.CDLL(None)
        for option, value in ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, 2**25), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            if not malloc.mallopt(option, value):
                raise OSError(f"mallopt refused option {option}.")


def take_turns(
    names: Sequence[str], size: Size, *, clock: Callable[[], float], contenders: Contenders = CONTENDERS
) -> dict[str, list[float]]:
    """Run the contenders once, in turns, and return the median seconds per step of each one's turns."""
    ring: deque[Runner] = deque()
    ring.extend(Runner(name, size, ring=ring, clock=clock, contenders=contenders) for name in names)
    runners = list(ring)
    with _quiet():
        for runner in runners:
            runner.start()
        runners[0].gate.release()
        for runner in runners:
            runner.join()
    for runner in runners:
        if runner.error is not None:
            raise runner.error
    return {runner.name: runner.medians[NUM_WARMUP_TURNS:] for runner in runners}


def count_calls(name: str, size: Size, *, num_steps: int = 20, contenders: Contenders = CONTENDERS) -> CallCounter:
    """Count the Python functions that a contender's steps call."""
    counter = CallCounter(size, num_steps)
    with _quiet():
        contenders[name](counter.job)
    return counter


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table; ratios and microseconds are relative to the plain loop of the same round."""

    size: str
    contender: str
    form: str
    step_ms: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    extra_us: float
    calls: float
    extra_calls: float
    ratios: list[float]


def measure(
    size: Size,
    names: Sequence[str],
    *,
    num_repeats: int,
    clock: Callable[[], float] = time.thread_time,
    contenders: Contenders = CONTENDERS,
) -> list[Result]:
    """Compare contenders with the plain loop, which always takes part.

    Args:
        size: The model.
        names: Keys of `CONTENDERS`.
        num_repeats: How often all start anew, in another order.
        clock: Gives seconds.
        contenders: Who there is.

    Raises:
        AssertionError: A contender ends with other parameters than the plain loop: it does other work.
    """
    names = ["plain", *(name for name in names if name != "plain")]
    num_steps = min(20, size.num_turns * size.steps_per_turn // 4)
    counters = {name: count_calls(name, size, num_steps=num_steps, contenders=contenders) for name in names}
    for counter in counters.values():
        torch.testing.assert_close(counter.job.net.state_dict(), counters["plain"].job.net.state_dict())
    calls = {name: counter.per_step() for name, counter in counters.items()}
    medians: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_repeats):
        # Shuffled, because it matters who went before: that one's code and data are in the caches.
        order = random.Random(number).sample(names, len(names))
        for name, found in take_turns(order, size, clock=clock, contenders=contenders).items():
            medians[name] += found
    results = []
    for name in names:
        pairs = list(zip(medians[name], medians["plain"], strict=True))
        ratios = [mine / plain for mine, plain in pairs]
        low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
        results.append(
            Result(
                size=size.name,
                contender=name,
                form=counters[name].form,
                step_ms=statistics.median(medians[name]) * 1e3,
                ratio=statistics.median(ratios),
                ratio_quartiles=(low, high),
                extra_us=statistics.median(mine - plain for mine, plain in pairs) * 1e6,
                calls=calls[name],
                extra_calls=calls[name] - calls["plain"],
                ratios=ratios,
            )
        )
    return results


# -- reporting -------------------------------------------------------------------------------------------------------


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| size | contender | ms per step | ratio to plain (quartiles) | Python calls |",
        "|---|---|---:|---:|---:|",
    ]
    for result in results:
        low, high = result.ratio_quartiles
        lines.append(
            f"| {result.size} | {result.contender} | {result.step_ms:.2f} "
            f"| {result.ratio:.3f} ({low:.3f} to {high:.3f}) | {result.calls:.0f} |"
        )
    return "\n".join(lines)


def verdicts(results: Sequence[Result]) -> Iterator[str]:
    """Compare hftrain's ratios with their budgets."""
    for result in results:
        budget = SIZES[result.size].budget
        if budget is not None and result.contender.startswith("hftrain"):
            verdict = "within" if result.ratio <= budget else "over"
            yield f"{result.contender} at {result.size}: {result.ratio:.3f}, {verdict} the budget of {budget:.2f}"


def write_pages(head: str, results: Sequence[Result]) -> None:
    """Put the fused rows into docs/performance.md, and main ratios into README.md; `tests/docs` compares the two."""
    root = Path(__file__).resolve().parents[1]
    rows = table([result for result in results if result.form == "fused"])
    write_between(root / "docs/performance.md", "printed by: python benchmarks/overhead.py", f"{head}\n\n{rows}\n")
    lines = [
        "| step of the plain loop | hftrain, task | hftrain, plain model | accelerate | transformers | Lightning |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    found = {(result.size, result.contender): result for result in results}
    for size in SIZES:
        plain_ms = found[size, "plain"].step_ms
        shown = f"{plain_ms:.1f} ms" if plain_ms < 10 else f"{plain_ms:.0f} ms"
        shown += f", {size[:-8]} parameter tensors" if size.endswith(" tensors") else ""
        lines.append(f"| {shown} | {' | '.join(f'{found[size, name].ratio:.2f}' for name in _SHOWN)} |")
    write_between(root / "README.md", "written by: nox -s figures", "\n".join(lines) + "\n")


def versions() -> str:
    """Return what was measured with, as a sentence."""
    packages = {name: version(name) for name in ("torch", "accelerate", "transformers", "lightning")}
    shown = ", ".join(f"{name} {number}" for name, number in packages.items())
    return f"Python {platform.python_version()}, {shown}, on one core; thread CPU time, medians of alternating rounds:"


def frames(name: str, size: Size) -> str:
    """Return a Markdown table of the Python functions that a contender calls more or less often than the plain loop."""
    mine, plain = count_calls(name, size), count_calls("plain", size)
    total = {code: (mine.calls[code] - plain.calls[code]) / mine.num_steps for code in {*mine.calls, *plain.calls}}
    lines = ["| calls per step | function | where |", "|---:|---|---|"]
    for code, count in sorted(total.items(), key=lambda item: (-item[1], item[0].co_filename, item[0].co_firstlineno)):
        if count:
            where = "/".join(Path(code.co_filename).parts[-3:])
            # Python 3.10 knows the plain name only.
            lines.append(
                f"| {count:+g} | {getattr(code, 'co_qualname', code.co_name)} | {where}:{code.co_firstlineno} |"
            )
    return "\n".join([*lines, f"| {sum(total.values()):+g} | in all | |"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--repeats", type=int, default=5, help="how often all start anew")
    parser.add_argument("--clock", choices=CLOCKS, default="cpu", help="cpu: time on the core; wall: on the wall clock")
    parser.add_argument("--json", type=Path, help="also write every number to this file")
    parser.add_argument("--write", action="store_true", help="put what is measured into README.md and docs/")
    parser.add_argument("--frames", choices=CONTENDERS, help="list functions instead of measuring time")
    options = parser.parse_args()
    if options.write and (options.sizes != list(SIZES) or not all(map(is_installed, _SHOWN))):
        parser.error("--write needs every size, accelerate, transformers and lightning")
    torch.set_num_threads(1)
    keep_memory()
    if options.frames:
        print(frames(options.frames, SIZES[options.sizes[0]]))
        return
    for name in options.contenders:
        if not is_installed(name):
            print(f"{name} is not installed and left out.", file=sys.stderr)
    names = [name for name in options.contenders if is_installed(name)]
    results: list[Result] = []
    for size in options.sizes:
        results += measure(SIZES[size], names, num_repeats=options.repeats, clock=CLOCKS[options.clock])
        print(f"{size}: done", file=sys.stderr)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, clock: {options.clock}\n")
    print(table(results))
    print("\n" + "\n".join(verdicts(results)))
    if options.write:
        write_pages(versions(), results)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
