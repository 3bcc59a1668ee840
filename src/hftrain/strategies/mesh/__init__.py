"""Models split over a mesh of processes: replicas, shards, tensor, context and pipeline parallelism."""

from __future__ import annotations
