"""What counts after a resume with changes: the rows of the table of docs/guides/resuming.md."""
