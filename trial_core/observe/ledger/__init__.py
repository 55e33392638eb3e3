"""The ledger of time: how a trial's slots spent their time in all its runs. See `run_clock`."""
