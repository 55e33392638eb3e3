"""Writes the weights of a model of any trial to one file."""
