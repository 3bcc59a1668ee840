"""Trainings that leave no trace: dry runs and finders."""
