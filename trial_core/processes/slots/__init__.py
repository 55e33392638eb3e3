"""Starts rank processes on this machine, and connects them to the driver."""
