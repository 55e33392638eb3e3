"""Helpers for all other folders, none of which they import."""
