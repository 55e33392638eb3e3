"""A run in the making: what comes next, how far it is, who watches it, how it is asked to stop."""
