"""The live report of a trial, in Markdown and as a page, and the report of a retraining.

`curves` chooses the figures and draws them in Markdown, `html_report` on the page.
"""
