"""The one package where a strategy and a precision meet: what a step calls, and which pairs can work."""
