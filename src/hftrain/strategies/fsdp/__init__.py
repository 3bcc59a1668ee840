"""Parameters, gradients and optimizer state split among processes, with torch's composable `fully_shard`."""

from hftrain.core.optional import require

# Before anything here is imported: older versions have no such names, and would not say why.
require("torch>=2.6", feature="strategy='fsdp'")
