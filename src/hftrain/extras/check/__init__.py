"""`hftrain check`: small proofs of what this machine does right, run where it stands."""
