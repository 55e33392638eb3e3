"""`trialflow data-arrived`: its help. Tests of deployed retrainings send the event."""

from __future__ import annotations

import pytest

from trialflow.deployments.cli.main import main


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    """With data."""
    assert main(["data-arrived", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "trialflow data-arrived gpt --data path=s3://bucket/2026-11-21" in shown
