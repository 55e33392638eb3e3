"""The live report of a trial: a Markdown artifact on the run's page, and a file."""

from __future__ import annotations

from trialflow.tasks.report.live_report import Report

__all__ = ["Report"]
