"""Experiment trackers: one per file, each told of a run and then of its metrics.

The package is the public name `hftrain.loggers`: it has the functions of the registry of trackers, such as `register`,
and their classes.
"""

from hftrain.core.lazy import lazy_names
from hftrain.loggers.registry import loggers

register, names, summary = loggers.register, loggers.names, loggers.summary
resolve, create = loggers.resolve, loggers.create

__getattr__, __dir__, __all__ = lazy_names(__name__, "register", "names", "summary", "resolve", "create")
