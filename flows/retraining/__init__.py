"""What the flow `retrain` needs besides its stages: one at a time, and its outcome."""
