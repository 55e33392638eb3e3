"""Drives a run: places and launches its ranks, and has them train, until the run ends.

`drive` has the story of a run, `stages` each of its stages. The driver imports neither Prefect nor
torch: a flow gives its stages as Prefect tasks, and a script the stages themselves.
"""
