"""Optimizers, parameter groups and learning-rate schedules, each by name. Imports `core` only."""
