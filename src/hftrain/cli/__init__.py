"""Command lines: the `hftrain` command, and options from dataclasses."""

from hftrain.cli.options import HfArg
from hftrain.cli.parser import HfArgumentParser

__all__ = ["HfArg", "HfArgumentParser"]
