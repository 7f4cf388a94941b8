"""Optimizers: recipes by label, the rivals, and how people see each of them."""
