"""The code that runs in every rank: one controller for all kinds of trial."""
