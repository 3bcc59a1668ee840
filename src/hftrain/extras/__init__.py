"""Extras: features on the public points of the core, a file or folder each, loaded when they are asked for."""
