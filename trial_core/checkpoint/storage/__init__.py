"""Storages behind fsspec, with the operations that checkpoints need. Knows no checkpoints."""
