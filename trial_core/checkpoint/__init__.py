"""Checkpoints: their manifests, keys and intents, the commit, fencing, and where a run resumes."""
