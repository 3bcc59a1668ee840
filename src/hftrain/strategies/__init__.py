"""Processes, placement and wrapping: where the model lives and how its copies agree. Knows precision by policy only.

The package is the public name `hftrain.strategies`: it has the functions of the registry of strategies, such as
`register`, and their classes.
"""

from hftrain.core.lazy import lazy_names
from hftrain.strategies.registry import strategies

register, names, summary = strategies.register, strategies.names, strategies.summary
resolve, create = strategies.resolve, strategies.create

__getattr__, __dir__, __all__ = lazy_names(__name__, "register", "names", "summary", "resolve", "create")
