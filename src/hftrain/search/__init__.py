"""Search for hyper-parameters: what a backend asks for, and the best run it found."""
