"""What is refused before a run, and why: one module for each concern; none needs a Trainer."""
