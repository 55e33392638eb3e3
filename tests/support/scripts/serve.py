"""Serves a flow: ``python -m tests.support.scripts.serve train|own DEPLOYMENT``."""

from __future__ import annotations

import sys

from tests.support.scripts.own_flow import own
from trialflow.flows.train import train

if __name__ == "__main__":
    served = {"train": train, "own": own}[sys.argv[1]]
    served.serve(name=sys.argv[2], print_starting_message=False)
