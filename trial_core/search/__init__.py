"""Hyperparameter search: which trials a search trains, how far, and with which hyperparameters.

A search trains a trial to a *rung*, a length at which it is validated and saved. A trial that waits
at a rung is a committed checkpoint; one that is promoted continues from it.

`settings` has the experiment's section, `halving` decides, `log` records what has happened in the
storage, and `state` makes of the log what is due next. All of that is pure but the log. The flow
`search` has the trials trained, by the flow `train`.
"""
