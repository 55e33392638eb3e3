"""The live report of a trial: one Markdown artifact on the run's page, and the same as a file."""

from __future__ import annotations

from tasks.report.live import Report

__all__ = ["Report"]
