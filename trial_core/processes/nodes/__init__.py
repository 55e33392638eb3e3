"""Runs ranks on several machines: node providers, the driver's end, and each node's agent."""
