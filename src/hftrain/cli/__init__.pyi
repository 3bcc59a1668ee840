"""The public names of the package; see `hftrain/__init__.pyi`."""

from hftrain.cli.configured import fit as fit
from hftrain.cli.options import HfArg as HfArg
from hftrain.cli.parser import HfArgumentParser as HfArgumentParser
