"""Words and tools every room shares: errors, registry, events, progress, seeds, results. Imports no other room."""
