"""Core API scripts, in slots and outside; `trial_core.core` has the public names."""
