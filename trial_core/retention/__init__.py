"""Which checkpoints stay: rules, pins, claims of running trials, and pruning."""
