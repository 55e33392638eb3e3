"""Data loading that can continue at any position: shuffles, shards and skips."""
