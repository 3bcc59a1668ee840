"""Experiment trackers, one per file: each records a run's settings and then its metrics.

`hftrain.loggers` is public: it exports the functions of the tracker registry, such as `register`, and the tracker
classes.
"""

from hftrain.core.lazy import lazy_names
from hftrain.loggers.registry import loggers

register, names, summary = loggers.register, loggers.names, loggers.summary
resolve, create = loggers.resolve, loggers.create

__getattr__, __dir__, __all__ = lazy_names(__name__, "register", "names", "summary", "resolve", "create")
