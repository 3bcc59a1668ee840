"""What `configure_optimizers` returns beyond one optimizer: with schedules, several, or stepped by the task."""
