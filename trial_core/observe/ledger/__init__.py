"""The ledger of time: what the slots of a trial did, over all its runs. See `run_clock`."""
