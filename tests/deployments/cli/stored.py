"""Checkpoints in a folder, for the commands that look after them: see the fixtures."""

from __future__ import annotations

from pathlib import Path

from trialflow.deployments.cli.main import main

UUIDS = ("aaaaaaaa-0000-4000-8000-000000000001", "aaaaaaab-0000-4000-8000-000000000002")


def run(tmp_path: Path, *arguments: str) -> int:
    """A command of `trialflow checkpoints` on that storage; its exit code."""
    return main(["checkpoints", *arguments, "--storage", str(tmp_path / "storage")])
