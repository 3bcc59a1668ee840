"""Evaluation: how a model is made ready for it, and one pass over a loader."""
