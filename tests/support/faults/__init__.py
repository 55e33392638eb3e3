"""Storages that fail on purpose, by a plan: an S3 endpoint and a fsspec file system."""
