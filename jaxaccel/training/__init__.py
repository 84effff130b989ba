"""Training: losses, optimizer, the step, the loop, checkpoints and metrics."""
