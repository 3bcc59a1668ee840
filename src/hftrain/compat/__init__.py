"""Put hftrain's objects in place of transformers', for libraries that derive their own trainers from those.

::

    import hftrain.compat

    hftrain.compat.install()

    from trl import SFTTrainer  # derives from hftrain's Trainer now
"""

from hftrain.compat.replacing import install, uninstall

__all__ = ["install", "uninstall"]
