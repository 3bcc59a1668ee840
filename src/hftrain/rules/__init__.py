"""Checks before a run: one module per concern; none needs a Trainer."""
