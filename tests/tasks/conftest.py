"""Fixtures for tests of tasks outside flows."""

from __future__ import annotations

from tests.tasks.report.reports import new_report, no_artifact, no_server

__all__ = ["new_report", "no_artifact", "no_server"]
