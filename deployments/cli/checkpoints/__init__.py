"""`trialflow checkpoints`: list, show, download, pin, verify, prune."""
