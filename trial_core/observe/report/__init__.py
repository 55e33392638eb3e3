"""The live report of a trial, in Markdown and as a page, and the report of a retraining.

`curves` chooses the figures; `mermaid` draws them in Markdown, `html_report` on the page.
"""

from __future__ import annotations

from trial_core.observe.report.live_report import Report

__all__ = ["Report"]
