"""What a run shows while it runs, and its summary at the end."""
