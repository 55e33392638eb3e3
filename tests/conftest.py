"""Fixtures that several tests share. Servers and warm ranks start once a session."""

from __future__ import annotations

import os

# Before anything imports deepspeed or prefect: tests run on CPU ranks, and speak to nobody.
os.environ["DS_ACCELERATOR"] = "cpu"
os.environ["PREFECT_SERVER_ANALYTICS_ENABLED"] = "false"
os.environ["DO_NOT_TRACK"] = "1"

pytest_plugins = [
    "tests.support.s3",
    "tests.support.slots",
    "tests.support.prefect",
    "tests.support.flow",
]
