"""The laboratory: matched-seed studies of optimizers on the paper's testbeds and on a user's own training code.

Nothing is imported here, so that `kourkoutas.lab` costs nothing and names no framework.
"""
