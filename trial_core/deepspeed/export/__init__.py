"""Exports the weights of a checkpoint as one file."""
