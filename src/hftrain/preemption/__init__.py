"""Stops and saves that are requested from outside: signals, agreement of the processes on a step, the grace period."""
