"""Where checkpoints go and how many stay."""

from __future__ import annotations

from pathlib import Path

from support.tiny import make_arguments

from hftrain.adapter.configs import checkpoint_config
from hftrain.checkpoint.manager import CheckpointConfig


def test_checkpoints_follow_the_arguments(tmp_path: Path) -> None:
    arguments = make_arguments(tmp_path, save_total_limit=2, save_only_model=True, save_safetensors=False)
    assert checkpoint_config(arguments, output_dir=tmp_path / "out") == CheckpointConfig(
        output_dir=tmp_path / "out", save_total_limit=2, only_model=True, safe_weights=False
    )


def test_defaults_are_those_of_the_manager(tmp_path: Path) -> None:
    assert checkpoint_config(make_arguments(tmp_path), output_dir=tmp_path) == CheckpointConfig(output_dir=tmp_path)
