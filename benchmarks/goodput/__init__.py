"""How much of its time does a run train, if it fails again and again? ``make bench NAME=goodput``.

Each contestant trains the same batches while the harness kills, hangs and stops its processes; the
scripts of the contestants are the modules `with_…`.
"""
