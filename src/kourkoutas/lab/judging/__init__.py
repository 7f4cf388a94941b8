"""Statistics of what came out, and their tables."""
