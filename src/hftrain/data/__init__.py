"""Datasets become loaders: columns, collators, samplers, shards, and the feed that the training loop reads."""
