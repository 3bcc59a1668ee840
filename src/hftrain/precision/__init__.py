"""Numerics: dtypes of operations, loss scaling and the global flags they need. Independent of strategies."""
