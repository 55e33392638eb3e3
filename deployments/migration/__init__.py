"""Moves a user's files from Determined: `imports` for sources, `experiment_files` for YAML."""
