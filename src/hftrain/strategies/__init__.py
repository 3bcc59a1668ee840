"""Processes, placement and wrapping: where the model lives and how its copies agree. Knows precision by policy only."""
