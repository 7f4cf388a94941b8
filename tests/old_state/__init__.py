"""State and results written by released versions, which every later version must load."""
