"""One training run: its parts, plan, construction, execution, checkpoints and cleanup, without a Trainer."""
