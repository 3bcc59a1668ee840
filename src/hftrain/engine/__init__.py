"""Setup, step, data and checkpoints for user-written training loops."""
