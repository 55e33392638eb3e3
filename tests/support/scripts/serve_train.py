"""``serve_train.py NAME`` serves the deployment ``train/NAME`` with ``flow.serve()``."""

from __future__ import annotations

import sys

from trialflow.flows.train import train

if __name__ == "__main__":
    train.serve(name=sys.argv[1], print_starting_message=False)
