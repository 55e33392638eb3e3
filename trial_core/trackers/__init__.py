"""For a tracker of your own: `tracker.Tracker`, and the `records` that it is given.

docs/guides/trackers.md shows one. The trackers themselves are in `trial_core.observe.trackers`.
"""
