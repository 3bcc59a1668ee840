"""Report a run to experiment trackers: which ones, and a callback for each."""
