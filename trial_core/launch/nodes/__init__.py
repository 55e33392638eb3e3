"""Runs ranks on several machines: node providers, the driver's end, and the agent of each node."""
