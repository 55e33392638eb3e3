"""Pure: units, what is due next, requests to stop, how a run ends."""
