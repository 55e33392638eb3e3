"""Moves a rank's files: memory files, the persister process, uploads and downloads."""
