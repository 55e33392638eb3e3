"""Restores DeepSpeed engines on another number of ranks, or with another ZeRO stage."""
