"""The results folder of a study: what is on the disk, and nothing of what it means."""
