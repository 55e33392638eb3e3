"""Which checkpoints stay: rules, pins, holds and claims; pruning and the sweep of leftovers."""
