"""What a checkpoint holds, where, and how it is committed, verified, rotated and found again."""
