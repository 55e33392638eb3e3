"""Processes: the ranks of this machine, those of other machines, and what they need there."""
