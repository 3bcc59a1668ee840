"""Bytes on disk: durable files, the atomic commit of a folder, tensors. Imports core only."""
