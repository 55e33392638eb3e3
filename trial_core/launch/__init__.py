"""Starts the ranks of a run, on this machine and on nodes."""
