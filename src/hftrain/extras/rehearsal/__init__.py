"""Trainings that leave no trace: dry runs, finders and memory estimates."""
