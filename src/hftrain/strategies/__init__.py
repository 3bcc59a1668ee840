"""Strategies: process groups, model placement, wrapping and replica synchronisation.

Strategies depend on a precision only through its policy. `hftrain.strategies` is public: it exports the functions of
the strategy registry, such as `register`, and the strategy classes.
"""

from hftrain.core.lazy import lazy_names
from hftrain.strategies.registry import strategies

register, names, summary = strategies.register, strategies.names, strategies.summary
resolve, create = strategies.resolve, strategies.create

__getattr__, __dir__, __all__ = lazy_names(__name__, "register", "names", "summary", "resolve", "create")
