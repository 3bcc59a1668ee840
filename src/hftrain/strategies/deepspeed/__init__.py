"""DeepSpeed: its engine runs backward, clipping, scaling and the update; the config says how much is split."""
