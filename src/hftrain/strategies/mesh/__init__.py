"""Models split over a mesh of processes: replicas, shards, tensor, context and pipeline parallelism."""

from __future__ import annotations

from hftrain.strategies.mesh.strategy import MeshStrategy

__all__ = ["MeshStrategy"]
