"""Showing a study to people: figures, report, progress."""
