"""What keeps a run alive and exact: checkpoints, resuming, signals, failed ranks, steps that are not finite."""
