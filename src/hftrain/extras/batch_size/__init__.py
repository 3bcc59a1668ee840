"""Batches that fit into memory: split, or smaller from the start."""
