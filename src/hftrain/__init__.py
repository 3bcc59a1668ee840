"""hftrain: modular PyTorch training that speaks the Hugging Face Trainer's language."""

__version__ = "0.1.0"
