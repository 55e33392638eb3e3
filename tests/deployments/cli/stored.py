"""Runs commands of `trialflow checkpoints` on the storage of the fixtures in conftest.py."""

from __future__ import annotations

from pathlib import Path

from trialflow.deployments.cli.main import main

UUIDS = ("aaaaaaaa-0000-4000-8000-000000000001", "aaaaaaab-0000-4000-8000-000000000002")


def run(tmp_path: Path, *arguments: str) -> int:
    """Run a command of `trialflow checkpoints` on that storage; return its exit code."""
    return main(["checkpoints", *arguments, "--storage", str(tmp_path / "storage")])
