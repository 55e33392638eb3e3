"""Processes: of this machine, of other machines, and what they need."""
