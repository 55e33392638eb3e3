"""Pure logic: units, the next workload, requests to stop, the end of a run."""
