"""hftrain: modular PyTorch training that speaks the Hugging Face Trainer's language."""

from hftrain.core.lazy import lazy_names

__version__ = "0.1.0"

# `loggers`, `loops` and `strategies` are packages, and their functions are those of the registries: a name that hid its
# package would make `import hftrain.strategies.ddp as ddp` fail.
__getattr__, __dir__, __all__ = lazy_names(__name__)
