"""`--json`: one object on stdout, and nothing else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from trialflow.deployments.cli.json_output import print_json, stdout_for_json, taking_results


def test_json_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    """Stored texts may have them, and a terminal would obey."""
    log = {"trial": "a", "rank": 0, "text": "\x1b[31m \x7f \x9b31m é"}
    print_json("logs", log)
    text = capsys.readouterr().out
    assert text.replace("\n", "").isprintable()
    assert json.loads(text) == {"command": "logs", "schema_version": 1, **log}


def test_results_can_be_taken_in_place_of_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """As `trialflow mcp` does, whose stdout is its protocol's."""
    with taking_results() as results:
        print_json("worker", {"pool": "local", "stopped_by": "SIGTERM"})
    assert [each["pool"] for each in results] == ["local"]
    assert capsys.readouterr().out == ""


def test_child_processes_print_to_stderr_too(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As Prefect's worker does, which `trialflow worker --json` starts."""
    with stdout_for_json(True):
        print("a print")
        subprocess.run(["echo", "a child"], check=True)
    print("{}", flush=True)
    said = capfd.readouterr()
    assert said.out == "{}\n"
    assert "a child" in said.err
