"""What every package shares: errors, registry, events, progress, seeds, results. Imports no other package."""
