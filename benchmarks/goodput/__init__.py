"""Measures the share of its time in which a run trains if it fails again and again.

``make bench NAME=goodput``. Each contestant trains the same batches while the harness kills, hangs
and stops its processes. The contestants' scripts are the modules `with_…`.
"""
