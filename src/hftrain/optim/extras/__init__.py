"""Optimizers of optional packages: one file each, named by one line of `optim.optimizers`."""
