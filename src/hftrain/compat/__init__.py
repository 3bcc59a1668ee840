"""Replace transformers' objects with hftrain's, for libraries that derive their trainers from them.

::

    import hftrain.compat

    hftrain.compat.install()

    from trl import SFTTrainer  # derives from hftrain's Trainer now
"""

from hftrain.compat.replacing import install, uninstall

__all__ = ["install", "uninstall"]
