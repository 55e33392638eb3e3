"""The flows: `train`, `evaluate`, `retrain`, `prune`."""
