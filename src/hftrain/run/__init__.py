"""One training: its parts and its plan, how it is built, runs, is saved and closed; none needs a Trainer."""
