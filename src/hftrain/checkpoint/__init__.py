"""Checkpoints: content, layout, commit, verification, rotation and lookup."""
