"""Parts of the flow `retrain`: the lock of a model, and the outcome of a run."""
