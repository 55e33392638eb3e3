"""Places ranks on several machines: engines, the driver's end, and the agent of each node."""
