"""The logic of a run: run loop, sequencer, resume points, stop requests, folders and run files."""
