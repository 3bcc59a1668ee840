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

_MOST_TOKENS = 60
_NEAR = 32
_MOST_REPLAYS = 3
_MOST_ROWS = 8


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
    told = [lines[0].get("norm") for lines in ledger.values()]
    norms = [float(norm) if isinstance(norm, (int, float)) else math.nan for norm in told]
    found: dict[int, tuple[float, float]] = {}
    for place, step in enumerate(steps):
        others = slice(max(0, place - WINDOW), place) if place >= MIN_STEPS else slice(0, 2 * MIN_STEPS)
        loss, norm = losses[place], norms[place]
        is_out = not loss <= limit_of(losses[others])
        if is_out or (ledger[step][0].get("norm") is not None and not norm <= limit_of(norms[others])):
            found[step] = loss, norm
    return found


def suspects_of(ledger: Lines, steps: Sequence[int]) -> list[Suspect]:
    """Return the samples of some steps whose loss or norm stands out among those of 32 steps before and after.

    If none does, the first one of each step; without losses of samples, those of the micro-batch with the highest loss
    of each step.
    """
    found: dict[str, Suspect] = {}
    others: list[Suspect] = []
    for step in steps:
        entries = [each for line in ledger[step] for each in _entries(line)]
        worst = max((math.inf if math.isnan(each.size) else each.size for each in entries), default=0.0)
        near = [line for other in range(step - _NEAR, step + _NEAR + 1) for line in ledger.get(other, ())]
        own = [each for line in near for each in _entries(line) if each.is_own]
        limit, most = limit_of(each.loss for each in own), limit_of(each.norm for each in own if each.norm is not None)
        for one in entries:
            is_out = not one.loss <= (limit if one.is_own else math.nextafter(worst, -math.inf))
            if is_out or (one.norm is not None and not one.norm <= most):
                first = found.setdefault(json.dumps(one.sample), one)
                found[json.dumps(one.sample)] = max(first, one, key=lambda each: (math.isnan(each.size), each.size))
            elif one.size >= worst:
                others.append(one)
    found = found or {json.dumps(each.sample): each for each in others}
    uses: dict[str, list[int]] = defaultdict(list)
    for step, lines in ledger.items():
        for each in (each for line in lines for each in _entries(line)):
            uses[json.dumps(each.sample)].append(step)
    for name, suspect in found.items():
        suspect.steps = sorted(set(uses[name]))
    return list(found.values())


def _entries(line: Mapping[str, Any]) -> Iterator[Suspect]:
    losses, each, norms = (line.get(name) or [] for name in ("losses", "sample_losses", "sample_norms"))
    for number, samples in enumerate(line.get("samples") or []):
        own = each[number] if number < len(each) else None
        for place, sample in enumerate(samples or []):
            if isinstance(own, list) and len(own) == len(samples):
                yield Suspect(sample, float(own[place]), True, norms[number][place] if norms else None)
            elif number < len(losses):
                yield Suspect(sample, float(losses[number]), False)


def _replay_each(run: str, ledger: Lines, steps: Sequence[int]) -> tuple[Lines, list[str]]:
    """Do steps again; return the ledger with the loss and norm of each of their samples, and what there is to say."""
    changed, lines = dict(ledger), [f"Replayed step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}."]
    for step in steps:
        with tempfile.TemporaryDirectory() as folder:
            found = read_ranks(do_step_apart(run, step, Path(folder), has_samples=True), "samples")
            _, _, difference = first_parting({step: ledger[step]}, read_ledger(folder))
        if difference:
            lines.append(f"step {step} is not the same when it is replayed: {difference}")
        if problem := found[0]["problem"]:
            lines.append(f"step {step}: no losses of samples: {problem}")
        changed[step] = [_with_losses(line, each["samples"]) for line, each in zip(ledger[step], found, strict=True)]
    return changed, lines


def _with_losses(line: Mapping[str, Any], found: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return a process's line of a step with the losses and norms of its samples, if they are the same samples."""
    parts = [[each for each in found if each["micro_batch"] == number] for number in range(len(line["samples"]))]
    if [[each["sample"] for each in part] for part in parts] != line["samples"]:
        return line
    losses, norms = ([[each[name] for each in part] for part in parts] for name in ("loss", "norm"))
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
    looked_at = [step] if step is not None else list(spikes)
    if not looked_at:
        return Answer(["No step stands out from those before it."], {"spikes": [], "suspects": []})
    lines: list[str] = []
    if replay:
        looked_at = looked_at[:_MOST_REPLAYS]
        ledger, lines = _replay_each(run, ledger, looked_at)
    suspects = suspects_of(ledger, looked_at)
    for each in suspects:
        each.spikes = [step for step in each.steps if step in spikes]
    suspects.sort(key=_rank)
    _show_contents(flight_folder(run).parent, ledger, suspects[:top])
    lines += [_describe_step(each, spikes, ledger) for each in looked_at[:top]]
    lines += [f"and {len(looked_at) - top} more" for _ in range(len(looked_at) > top)]
    lines += ["", *(line for suspect in suspects[:top] for line in _describe(suspect))]
    lines += [f"and {len(suspects) - top} more samples" for _ in range(len(suspects) > top)]
    if not suspects:
        lines.append("The samples of these steps are not known: their loader is not one of hftrain's or torch's.")
    elif not all(each.is_own for each in suspects):
        lines += ["", "Losses are known by micro-batch. For those of samples, replay these steps with --replay, or"]
        lines += ["train with FlightLog(sample_losses=...)."]
    if output is not None:
        Path(output).write_text(json.dumps([each.sample for each in suspects]) + "\n", encoding="utf-8")
        first = min((each.steps[0] for each in suspects), default=looked_at[0])
        lines += ["", f"Wrote {len(suspects)} samples to {output}. To go on without them: resume from a checkpoint"]
        lines += [f"before step {first}, with Trainer(..., exclude_samples={output!r})."]
    data = [vars(each) for each in suspects]
    return Answer(lines, {"spikes": [{"step": each, "loss": spikes.get(each, (None,))[0]} for each in looked_at],
                          "suspects": data})  # fmt: skip


def _rank(suspect: Suspect) -> tuple[Any, ...]:
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
    for step in sorted({step for each in suspects for step in each.steps}):
        for rank, line in enumerate(ledger[step]):
            path = run / FOLDER / "spikes" / f"step{step:08d}-rank{rank}.pt"
            with suppress(Exception):  # which torch raises, in many kinds, if it is missing or damaged
                batches = load_containers(path)
                for samples, batch in zip(line.get("samples") or [], batches, strict=False):
                    for place, sample in enumerate(samples or []):
                        rows[json.dumps(sample)] = _row(batch, place, len(samples))
    marks = {name: [(key, value.tolist()) for key, value in row.items()] for name, row in rows.items()}
    for each in suspects:
        name = json.dumps(each.sample)
        if name in rows:
            each.shown = _look(run, each.sample, rows[name])
            each.twins = [json.loads(other) for other in marks if other != name and marks[other] == marks[name]]


def _row(batch: Mapping[str, torch.Tensor], place: int, size: int) -> dict[str, torch.Tensor]:
    return {name: value[place] for name, value in batch.items() if value.dim() and len(value) == size}


def _look(run: Path, sample: Any, row: Mapping[str, torch.Tensor]) -> str:
    """Return a text of a sample's tokens, the path of its picture, or its numbers in short."""
    parts = []
    for name, value in row.items():
        if name == "input_ids":
            parts.append(_decoded(run, value, row.get("attention_mask")))
        elif value.is_floating_point() and value.dim() >= 2:
            parts.append(f"{name}: {_picture(run, sample, value)}")
        elif name != "attention_mask":
            text = ", ".join(f"{each:.4g}" for each in value.flatten()[:8].tolist())
            parts.append(f"{name}: {text}{', ...' if value.numel() > 8 else ''}")
    return "; ".join(parts)


def _decoded(run: Path, tokens: torch.Tensor, mask: torch.Tensor | None) -> str:
    """Return tokens as text, with any tokenizer that the run has saved: all of them are of one Trainer."""
    tokens = tokens if mask is None else tokens[mask.bool()]
    shown = tokens[:_MOST_TOKENS].tolist()
    folder = next((path.parent for path in sorted(run.glob("**/tokenizer_config.json"))), None)
    try:
        from transformers import AutoTokenizer

        text = repr(AutoTokenizer.from_pretrained(folder).decode(shown)) if folder else f"tokens {shown}"
    except Exception:  # of any kind, from any tokenizer's code: the numbers are shown instead
        text = f"tokens {shown}"
    return f"{text} ({len(tokens)} tokens)"


def _picture(run: Path, sample: Any, value: torch.Tensor) -> str:
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
    suspects = show_blame(run, top=_MOST_ROWS).data["suspects"][:_MOST_ROWS] if spikes else []
    return {
        "steps": len(ledger),
        "spikes": [
            {"cells": (step, f"{loss:.5g}", f"{norm:.5g}")} for step, (loss, norm) in [*spikes.items()][:_MOST_ROWS]
        ],
        "num_left": max(0, len(spikes) - _MOST_ROWS),
        "samples": [_sample(run, each) for each in suspects],
        "phases": ["Process", *map(str.capitalize, PHASES)],
        "split": [{"cells": (rank, *(f"{ms[name]:.1f}" for name in PHASES))} for rank, ms in enumerate(split["ms"])],
        "waited": "Process {rank} was waited for, in {phase}.".format(**split["waited"]) if split["waited"] else "",
    }


def _sample(run: str, suspect: dict[str, Any]) -> dict[str, Any]:
    picture: Path = picture_path(flight_folder(run), suspect["sample"])
    data = base64.b64encode(picture.read_bytes()).decode() if picture.exists() else ""
    loss = f"{suspect['loss']:.5g}" + ("" if suspect["is_own"] else " (micro-batch)")
    often = f"{len(suspect['spikes'])} of {len(suspect['steps'])}"
    return {"cells": [suspect["sample"], loss, often], "picture": data, "shown": suspect["shown"] or ""}
