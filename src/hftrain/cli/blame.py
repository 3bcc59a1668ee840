"""`hftrain blame`: which samples are behind the steps whose loss or gradient norm stand out."""

from __future__ import annotations

import base64
import json
import math
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hftrain.cli.answer import Answer
from hftrain.cli.replay import do_step_apart, ledger_with, read_ranks
from hftrain.extras.flight.reading import (
    FOLDER,
    MIN_STEPS,
    WINDOW,
    Lines,
    first_parting,
    flight_folder,
    limit_of,
    read_ledger,
    total_loss,
)
from hftrain.extras.flight.split import PHASES, read_split
from hftrain.storage.tensors import load_containers

_MAX_TOKENS = 60
_NUM_NEIGHBOURS = 32
_MAX_REPLAYS = 3
_MAX_ROWS = 8


@dataclass
class Suspect:
    """A sample of a spike.

    Args:
        loss: Its own loss in the spike, or that of its micro-batch.
        norm: The norm of its own gradient; None if the step was not replayed.
        spikes: Those of them that are spikes.
        shown: Its content in words, or the path of a picture; None if it was not kept.
        twins: Other samples of kept batches with the same content.
    """

    sample: Any
    loss: float
    is_own: bool
    norm: float | None = None
    steps: list[int] = field(default_factory=list)
    spikes: list[int] = field(default_factory=list)
    shown: str | None = None
    twins: list[Any] = field(default_factory=list)

    @property
    def size(self) -> float:
        """What it is sorted by: the norm, or the loss."""
        return self.loss if self.norm is None else self.norm


def find_spikes(ledger: Lines) -> dict[int, tuple[float, float]]:
    """Return the steps whose mean loss over the processes, or whose norm, stand out.

    A step is compared with the 128 steps before it; one of the first 16 with the first 32.

    Returns:
        By step, its loss and its norm (NaN if none was computed).
    """
    steps = list(ledger)
    losses = [sum(map(total_loss, lines)) / len(lines) for lines in ledger.values()]
    logged_norms = [lines[0].get("norm") for lines in ledger.values()]
    norms = [float(norm) if isinstance(norm, (int, float)) else math.nan for norm in logged_norms]
    spikes: dict[int, tuple[float, float]] = {}
    for position, step in enumerate(steps):
        neighbours = slice(max(0, position - WINDOW), position) if position >= MIN_STEPS else slice(0, 2 * MIN_STEPS)
        loss, norm = losses[position], norms[position]
        is_outlier = not loss <= limit_of(losses[neighbours])
        if is_outlier or (ledger[step][0].get("norm") is not None and not norm <= limit_of(norms[neighbours])):
            spikes[step] = loss, norm
    return spikes


def suspects_of(ledger: Lines, steps: Sequence[int]) -> list[Suspect]:
    """Return the samples of some steps whose loss or norm stands out among those of 32 steps before and after.

    If none does, the first one of each step; without losses of samples, those of the micro-batch with the highest loss
    of each step.
    """
    suspects: dict[str, Suspect] = {}
    worst: list[Suspect] = []
    for step in steps:
        samples = [sample for line in ledger[step] for sample in _samples_of_line(line)]
        largest = max((math.inf if math.isnan(sample.size) else sample.size for sample in samples), default=0.0)
        loss_limit, norm_limit = _limits_near(ledger, step)
        for sample in samples:
            is_outlier = not sample.loss <= (loss_limit if sample.is_own else math.nextafter(largest, -math.inf))
            if is_outlier or (sample.norm is not None and not sample.norm <= norm_limit):
                name = json.dumps(sample.sample)
                known = suspects.get(name, sample)
                suspects[name] = max(known, sample, key=lambda suspect: (math.isnan(suspect.size), suspect.size))
            elif sample.size >= largest:
                worst.append(sample)
    suspects = suspects or {json.dumps(sample.sample): sample for sample in worst}
    uses: dict[str, list[int]] = defaultdict(list)
    for step, lines in ledger.items():
        for line in lines:
            for sample in _samples_of_line(line):
                uses[json.dumps(sample.sample)].append(step)
    for name, suspect in suspects.items():
        suspect.steps = sorted(set(uses[name]))
    return list(suspects.values())


def _limits_near(ledger: Lines, step: int) -> tuple[float, float]:
    """Return the loss and the norm above which a sample stands out among those of the steps around its own."""
    near = range(step - _NUM_NEIGHBOURS, step + _NUM_NEIGHBOURS + 1)
    lines = [line for neighbour in near for line in ledger.get(neighbour, ())]
    samples = [sample for line in lines for sample in _samples_of_line(line) if sample.is_own]
    norms = (sample.norm for sample in samples if sample.norm is not None)
    return limit_of(sample.loss for sample in samples), limit_of(norms)


def _samples_of_line(line: Mapping[str, Any]) -> Iterator[Suspect]:
    """Yield the samples of a process's line with their own losses, or else with that of their micro-batch."""
    losses, sample_losses, norms = (line.get(name) or [] for name in ("losses", "sample_losses", "sample_norms"))
    for number, samples in enumerate(line.get("samples") or []):
        own_losses = sample_losses[number] if number < len(sample_losses) else None
        for position, sample in enumerate(samples or []):
            if isinstance(own_losses, list) and len(own_losses) == len(samples):
                norm = norms[number][position] if norms else None
                yield Suspect(sample, float(own_losses[position]), True, norm)
            elif number < len(losses):
                yield Suspect(sample, float(losses[number]), False)


def _replay_steps(run: str, ledger: Lines, steps: Sequence[int]) -> tuple[Lines, list[str]]:
    """Do steps again; return the ledger with the loss and norm of each of their samples, and what there is to say."""
    replayed, lines = dict(ledger), [f"Replayed step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}."]
    for step in steps:
        with tempfile.TemporaryDirectory() as folder:
            rank_results = read_ranks(do_step_apart(run, step, Path(folder), has_samples=True), "samples")
            _, _, difference = first_parting({step: ledger[step]}, read_ledger(folder))
        if difference:
            lines.append(f"step {step} is not the same when it is replayed: {difference}")
        if problem := rank_results[0]["problem"]:
            lines.append(f"step {step}: no losses of samples: {problem}")
        ranks = zip(ledger[step], rank_results, strict=True)
        replayed[step] = [_with_losses(line, result["samples"]) for line, result in ranks]
    return replayed, lines


def _with_losses(line: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a process's line of a step with the losses and norms of its samples, if they are the same samples."""
    numbers = range(len(line["samples"]))
    parts = [[result for result in results if result["micro_batch"] == number] for number in numbers]
    if [[result["sample"] for result in part] for part in parts] != line["samples"]:
        return line
    losses, norms = ([[result[name] for result in part] for part in parts] for name in ("loss", "norm"))
    return {**line, "sample_losses": losses, "sample_norms": norms}


def show_blame(
    run: str, *, step: int | None = None, top: int = 5, output: str | None = None, replay: bool = False
) -> Answer:
    """Show the samples behind the spikes of a run that has a flight log, and write a list of them.

    Args:
        step: Look at this step instead of the spikes.
        output: A JSON file to write the samples to, for ``Trainer(exclude_samples=...)``.
        replay: Look at the first three spikes only, and do them again for the loss and the gradient norm of each
            sample; see `hftrain replay`.

    Raises:
        ConfigError: The run has no flight log, the step is not in it, or it cannot be done again.
    """
    ledger = ledger_with(run, step)
    spikes = find_spikes(ledger)
    step_list = [step] if step is not None else list(spikes)
    if not step_list:
        return Answer(["No step stands out from those before it."], {"spikes": [], "suspects": []})
    lines: list[str] = []
    if replay:
        step_list = step_list[:_MAX_REPLAYS]
        ledger, lines = _replay_steps(run, ledger, step_list)
    suspects = suspects_of(ledger, step_list)
    for suspect in suspects:
        suspect.spikes = [step for step in suspect.steps if step in spikes]
    suspects.sort(key=_sort_key)
    _show_contents(flight_folder(run).parent, ledger, suspects[:top])
    lines += [_describe_step(suspect, spikes, ledger) for suspect in step_list[:top]]
    lines += [f"and {len(step_list) - top} more" for _ in range(len(step_list) > top)]
    lines += ["", *(line for suspect in suspects[:top] for line in _describe(suspect))]
    lines += [f"and {len(suspects) - top} more samples" for _ in range(len(suspects) > top)]
    if not suspects:
        lines.append("The samples of these steps are not known: their loader is not one of hftrain's or torch's.")
    elif not all(number.is_own for number in suspects):
        lines += ["", "Losses are known by micro-batch. For those of samples, replay these steps with --replay, or"]
        lines += ["train with FlightLog(sample_losses=...)."]
    if output is not None:
        Path(output).write_text(json.dumps([suspect.sample for suspect in suspects]) + "\n", encoding="utf-8")
        first = min((suspect.steps[0] for suspect in suspects), default=step_list[0])
        lines += ["", f"Wrote {len(suspects)} samples to {output}. To go on without them: resume from a checkpoint"]
        lines += [f"before step {first}, with Trainer(..., exclude_samples={output!r})."]
    data = [vars(suspect) for suspect in suspects]
    return Answer(lines, {"spikes": [{"step": number, "loss": spikes.get(number, (None,))[0]} for number in step_list],
                          "suspects": data})  # fmt: skip


def _sort_key(suspect: Suspect) -> tuple[Any, ...]:
    """Return a sort key: NaN first; then the largest norms or losses, or those that spikes had most often."""
    share = 0.0 if suspect.is_own else len(suspect.spikes) / max(1, len(suspect.steps))
    return not math.isnan(suspect.size), -share, -suspect.size


def _describe_step(step: int, spikes: Mapping[int, Any], ledger: Mapping[int, Any]) -> str:
    loss = sum(map(total_loss, ledger[step])) / len(ledger[step])
    norm = ledger[step][0].get("norm")
    kind = "a spike" if step in spikes else "no spike"
    return f"step {step} is {kind}: loss {loss:.4g}" + ("" if norm is None else f", gradient norm {norm:.4g}")


def _describe(suspect: Suspect) -> list[str]:
    whose = "loss" if suspect.is_own else "loss of its micro-batch"
    spikes, steps = len(suspect.spikes), len(suspect.steps)
    norm = "" if suspect.norm is None else f"gradient norm {suspect.norm:.4g}, "
    text = f"sample {suspect.sample}: {whose} {suspect.loss:.4g}, {norm}"
    text += f"in {spikes} spike{'s' * (spikes != 1)} of {steps} step{'s' * (steps != 1)} that had it"
    if suspect.twins:
        text += f"; same content as {', '.join(map(str, suspect.twins))}"
    return [text, *([f"    {suspect.shown}"] if suspect.shown else [])]


# -- what samples look like ------------------------------------------------------------------------------------------


def _show_contents(run: Path, ledger: Lines, suspects: Sequence[Suspect]) -> None:
    rows: dict[str, dict[str, torch.Tensor]] = {}
    for step in sorted({step for suspect in suspects for step in suspect.steps}):
        for rank, line in enumerate(ledger[step]):
            path = run / FOLDER / "spikes" / f"step{step:08d}-rank{rank}.pt"
            with suppress(Exception):  # which torch raises, in many kinds, if it is missing or damaged
                batches = load_containers(path)
                for samples, batch in zip(line.get("samples") or [], batches, strict=False):
                    for position, sample in enumerate(samples or []):
                        rows[json.dumps(sample)] = _sample_row(batch, position, len(samples))
    contents = {name: [(key, value.tolist()) for key, value in row.items()] for name, row in rows.items()}
    for suspect in suspects:
        name = json.dumps(suspect.sample)
        if name in rows:
            suspect.shown = _describe_content(run, suspect.sample, rows[name])
            twins = (other for other in contents if other != name and contents[other] == contents[name])
            suspect.twins = list(map(json.loads, twins))


def _sample_row(batch: Mapping[str, torch.Tensor], position: int, size: int) -> dict[str, torch.Tensor]:
    return {name: value[position] for name, value in batch.items() if value.dim() and len(value) == size}


def _describe_content(run: Path, sample: Any, row: Mapping[str, torch.Tensor]) -> str:
    """Return a text of a sample's tokens, the path of its picture, or its numbers in short."""
    parts = []
    for name, value in row.items():
        if name == "input_ids":
            parts.append(_decode_tokens(run, value, row.get("attention_mask")))
        elif value.is_floating_point() and value.dim() >= 2:
            parts.append(f"{name}: {_save_picture(run, sample, value)}")
        elif name != "attention_mask":
            text = ", ".join(f"{number:.4g}" for number in value.flatten()[:8].tolist())
            parts.append(f"{name}: {text}{', ...' if value.numel() > 8 else ''}")
    return "; ".join(parts)


def _decode_tokens(run: Path, tokens: torch.Tensor, mask: torch.Tensor | None) -> str:
    """Return tokens as text, with any tokenizer that the run has saved: all of them are of one Trainer."""
    tokens = tokens if mask is None else tokens[mask.bool()]
    first_tokens = tokens[:_MAX_TOKENS].tolist()
    folder = next((path.parent for path in sorted(run.glob("**/tokenizer_config.json"))), None)
    try:
        from transformers import AutoTokenizer

        text = repr(AutoTokenizer.from_pretrained(folder).decode(first_tokens)) if folder else f"tokens {first_tokens}"
    except Exception:  # of any kind, from any tokenizer's code: the numbers are shown instead
        text = f"tokens {first_tokens}"
    return f"{text} ({len(tokens)} tokens)"


def _save_picture(run: Path, sample: Any, value: torch.Tensor) -> str:
    """Write a picture, and return its path; the size in words if it is none or Pillow is not installed."""
    image = value.squeeze()
    if image.dim() == 3 and image.shape[0] in (3, 4):
        image = image.permute(1, 2, 0)
    if not (image.dim() == 2 or (image.dim() == 3 and image.shape[2] in (3, 4))):
        return f"tensor {tuple(value.shape)}"
    try:
        from PIL import Image
    except ImportError:
        return f"tensor {tuple(value.shape)}"
    low, high = image.min(), image.max()
    pixels = ((image - low) / (high - low).clamp(min=1e-12) * 255).to(torch.uint8).numpy()
    path = picture_path(run / FOLDER, sample)
    picture = Image.fromarray(pixels)
    scale = max(1, 128 // max(picture.size))
    picture.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST).save(path)
    return str(path)


def picture_path(folder: Path, sample: Any) -> Path:
    """Return where the picture of a sample is in the folder of a flight log."""
    return folder / "spikes" / f"sample{'-'.join(map(str, sample)) if isinstance(sample, list) else sample}.png"


# -- what a report shows ----------------------------------------------------------------------------------------------


def tables_of(run: str) -> dict[str, Any] | None:
    """Return rows of the steps that stand out, the samples behind them, and where the time went; None without a log."""
    ledger = read_ledger(run)
    if not ledger:
        return None
    spikes, split = find_spikes(ledger), read_split(run) or {"ms": (), "waited": None}
    suspects = show_blame(run, top=_MAX_ROWS).data["suspects"][:_MAX_ROWS] if spikes else []
    return {
        "steps": len(ledger),
        "spikes": [
            {"cells": (step, f"{loss:.5g}", f"{norm:.5g}")} for step, (loss, norm) in [*spikes.items()][:_MAX_ROWS]
        ],
        "num_left": max(0, len(spikes) - _MAX_ROWS),
        "samples": [_sample_cells(run, suspect) for suspect in suspects],
        "phases": ["Process", *map(str.capitalize, PHASES)],
        "split": [{"cells": (rank, *(f"{ms[name]:.1f}" for name in PHASES))} for rank, ms in enumerate(split["ms"])],
        "waited": "Process {rank} was waited for, in {phase}.".format(**split["waited"]) if split["waited"] else "",
    }


def _sample_cells(run: str, suspect: dict[str, Any]) -> dict[str, Any]:
    picture: Path = picture_path(flight_folder(run), suspect["sample"])
    data = base64.b64encode(picture.read_bytes()).decode() if picture.exists() else ""
    loss = f"{suspect['loss']:.5g}" + ("" if suspect["is_own"] else " (micro-batch)")
    often = f"{len(suspect['spikes'])} of {len(suspect['steps'])}"
    return {"cells": [suspect["sample"], loss, often], "picture": data, "shown": suspect["shown"] or ""}
