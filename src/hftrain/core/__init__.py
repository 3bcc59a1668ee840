"""Code shared by all packages: errors, registry, events, progress, seeds, results. Imports no other package."""
