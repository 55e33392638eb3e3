"""Storages that fail on purpose, where a plan says so: an S3 endpoint and a fsspec file system."""
