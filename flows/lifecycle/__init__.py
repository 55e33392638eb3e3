"""How flow runs wait for accelerators, stop, restart, and go back into their queue."""
