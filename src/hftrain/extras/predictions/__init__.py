"""Predictions of an evaluation that are kept: for `compute_metrics`, and for whoever called `predict()`."""
