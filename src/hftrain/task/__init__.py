"""Tasks: a task owns the model, the loss and the metrics."""
