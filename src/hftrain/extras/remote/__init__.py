"""Output folders in a remote store: its files, their local mirror, and checkpoints there."""
