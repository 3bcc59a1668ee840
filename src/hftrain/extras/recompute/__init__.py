"""Recompute activations in the backward pass instead of keeping them: whole layers, or all but what is costly."""
