"""The public names of the package; see `hftrain/__init__.pyi`."""

from transformers.hf_argparser import HfArg as HfArg
from transformers.hf_argparser import HfArgumentParser as HfArgumentParser

from hftrain.cli.configured import fit as fit
