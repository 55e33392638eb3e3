"""The live report of a trial: one Markdown artifact on the run's page, and the same as a file."""

from __future__ import annotations

from trialflow.tasks.report.live_report import Report

__all__ = ["Report"]
