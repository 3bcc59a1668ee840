"""The parts of a training run for those who keep their own loop."""
