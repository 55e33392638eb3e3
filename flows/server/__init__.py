"""The Prefect servers that trialflow starts: for one run, or for `trialflow up`."""
