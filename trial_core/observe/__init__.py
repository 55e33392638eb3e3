"""Tells people about a run. Nothing here changes how it runs."""
