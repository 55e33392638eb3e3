"""How flow runs wait for accelerators, stop, restart, and go back into their queue.

Crashed runs are scheduled again by the server: `deployments/automations.py`.
"""
