"""What people call an optimizer; tables and JSON keep its id."""

from __future__ import annotations

KNOWN = {"kbeta": "K-β", "adam95": "Adam 0.95", "adam999": "Adam 0.999"}


def label(arm: str) -> str:
    """
    >>> label("kbeta"), label("adam95[lr=0.1]"), label("lion")
    ('K-β', 'Adam 0.95 [lr=0.1]', 'lion')
    """
    name, bracket, rest = arm.partition("[")
    return KNOWN.get(name, name) + (f" [{rest}" if bracket and name in KNOWN else bracket + rest)
