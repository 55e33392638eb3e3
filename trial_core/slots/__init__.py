"""Rank processes on this machine, and the channel between them and the driver."""
