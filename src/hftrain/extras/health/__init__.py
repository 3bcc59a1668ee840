"""Warnings about a user's training: what does not learn, what is not trained, and what a checkpoint does not hold."""
