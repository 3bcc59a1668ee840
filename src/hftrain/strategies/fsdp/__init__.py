"""Parameters, gradients and optimizer state split among processes, with torch's composable `fully_shard`."""
