"""The stages of a run, a file for each: what the driver has the ranks of a launch do."""
