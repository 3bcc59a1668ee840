"""Command lines: the `hftrain` command, trainings from files, and options from dataclasses."""

from hftrain.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
