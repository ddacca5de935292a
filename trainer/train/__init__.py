"""Training: the Lightning module, optimizer, schedule, strategies, checkpoints, progress."""
