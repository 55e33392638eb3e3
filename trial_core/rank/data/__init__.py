"""Data loading that continues where it was: positions, shuffles, shards, skips."""
