"""Where checkpoints go and how many stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hftrain.checkpoint.manager import CheckpointConfig


def checkpoint_config(args: Any, *, output_dir: Path, url: str | None = None) -> CheckpointConfig:
    """Return where checkpoints go and how many stay."""
    return CheckpointConfig(
        output_dir=output_dir,
        save_total_limit=args.save_total_limit,
        only_model=bool(args.save_only_model),
        safe_weights=bool(args.save_safetensors),
        on_each_node=bool(args.save_on_each_node),
        url=url,
    )
