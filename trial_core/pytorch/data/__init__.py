"""Reproducible data loading: shuffle, shard, skip."""
