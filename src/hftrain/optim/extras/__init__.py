"""Optimizers of optional packages: one file each, registered by one line of `optim.optimizers`."""
