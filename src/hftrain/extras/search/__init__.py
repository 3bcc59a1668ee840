"""Hyper-parameter search and its backends."""
