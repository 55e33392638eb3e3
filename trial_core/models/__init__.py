"""The registry of models, promotion of champions, and the journal of a retraining."""
