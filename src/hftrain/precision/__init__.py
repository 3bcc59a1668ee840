"""Numerics: what operations run in, how a loss is scaled, which global flags that needs. Knows no strategy."""
