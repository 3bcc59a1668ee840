"""Whether a script trains the same on several processes, in other divisions and precisions, and after a resume."""
