"""What runs in every rank: one controller for all kinds of trial."""
