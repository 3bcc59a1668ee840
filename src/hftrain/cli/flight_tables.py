"""What `hftrain report` shows of a run's flight log."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from hftrain.cli.blame import find_spikes, picture_path, show_blame
from hftrain.extras.flight.reading import flight_folder, read_ledger
from hftrain.extras.flight.split import PHASES, read_split

_MOST = 8


def tables_of(run: str) -> dict[str, Any] | None:
    """Return rows of the steps that stand out, the samples behind them, and where the time went; None without a log."""
    ledger = read_ledger(run)
    if not ledger:
        return None
    spikes, split = find_spikes(ledger), read_split(run) or {"ms": (), "waited": None}
    suspects = show_blame(run, top=_MOST).data["suspects"][:_MOST] if spikes else []
    return {
        "steps": len(ledger),
        "spikes": [{"cells": (step, f"{loss:.5g}", f"{norm:.5g}")} for step, (loss, norm) in [*spikes.items()][:_MOST]],
        "num_left": max(0, len(spikes) - _MOST),
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
