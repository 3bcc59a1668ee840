"""What each step of a run was made of, and how to find the samples behind a spike."""
