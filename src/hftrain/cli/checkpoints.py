"""`hftrain checkpoints`: list a run's checkpoints, whether they are intact, and which one a resume uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hftrain.checkpoint.manifest import verify
from hftrain.checkpoint.rotation import by_commit
from hftrain.cli.answer import Answer, table
from hftrain.core.errors import CheckpointError, ConfigError
from hftrain.storage.files import is_url, local_folder, readable_bytes

_HEAD = ("checkpoint", "step", "epochs", "size", "state")


def show_checkpoints(run: str | Path, *, should_verify: bool = False) -> Answer:
    """Return a line for each checkpoint of a run in commit order, and one about the checkpoint for a resume.

    Args:
        should_verify: Compare every file's SHA-256, as a resume does; otherwise everything but the content.

    Raises:
        ConfigError: The folder does not exist, or contains no checkpoint.
    """
    problem = f"Cannot list the checkpoints of {str(run)!r}."
    if is_url(run):
        raise ConfigError(problem, "It is a URL.", "Name a folder, or see them with 'hftrain report'.")
    folder = local_folder(run, start=Path())
    paths = by_commit(folder) if folder.is_dir() else []
    if not paths:
        reason = "It holds no checkpoint." if folder.is_dir() else "There is no such folder."
        raise ConfigError(problem, reason, "Name a run's output_dir.")
    facts: list[dict[str, Any]] = []
    rows, conclusion, resume = [_HEAD], "resume_from_checkpoint=True finds no complete checkpoint.", None
    for path in paths:
        try:
            manifest = verify(path, hashes=should_verify)
        except CheckpointError as error:
            rows.append((path.name, "", "", "", f"damaged: {error}"))
            facts.append({"checkpoint": path.name, "state": rows[-1][-1]})
            continue
        progress, num_batches = manifest.facts.get("progress", {}), manifest.facts.get("plan", {}).get("num_batches")
        epochs = progress.get("epoch", 0)
        if num_batches:
            epochs += progress.get("micro_steps_in_epoch", 0) / num_batches
        num_bytes = sum(record["size"] for record in manifest.files.values())
        state = "weights only" if manifest.only_model else "verified" if should_verify else "complete"
        state += "" if manifest.is_finite else ", not finite"
        state += ", limited data" if manifest.facts.get("limits") else ""
        conclusion = f"resume_from_checkpoint=True takes {path.name}" + (
            ", which cannot be resumed: save_only_model=True saved it." if manifest.only_model else "."
        )
        resume = None if manifest.only_model else path.name
        rows.append((path.name, str(manifest.step), f"{epochs:.2f}", readable_bytes(num_bytes), state))
        facts.append(dict(zip(_HEAD, (path.name, manifest.step, epochs, num_bytes, state), strict=True)))
    return Answer([*table(rows), "", conclusion], {"checkpoints": facts, "resume": resume})
