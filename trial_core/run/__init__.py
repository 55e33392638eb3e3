"""The logic of a run, without ranks: next workload, status, observers, stop requests, folders."""
