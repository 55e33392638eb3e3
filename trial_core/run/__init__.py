"""The logic of a run, for driver and scripts: next workload, status, observers, stop requests,
folders and run files."""
