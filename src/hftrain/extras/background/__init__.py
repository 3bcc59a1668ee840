"""`SavePolicy(save_async=True)`: write checkpoints while training continues."""
