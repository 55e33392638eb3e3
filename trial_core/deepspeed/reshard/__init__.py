"""Restoring DeepSpeed engines on another number of ranks, or another ZeRO stage."""
