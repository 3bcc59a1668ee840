"""Combination of a strategy and a precision: the calls of a step, and which pairs work."""
