"""The look of each arm: one colour and one dash in every figure, by name for the page and as hex for matplotlib.

The paper's three arms keep theirs in every study. Colours are Okabe and Ito's, told apart with every common kind of
colour blindness, darkened or lightened until they stand out from a white and from a dark page alike; the dash tells
arms apart in print and in grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LIGHT = ("#0072B2", "#B97100", "#00805C", "#C94F00", "#A8467F", "#2783B8", "#666666")
DARK = ("#58B4F2", "#F0B03F", "#35C795", "#FF8B50", "#E79CC8", "#9ADBFF", "#B5B5B5")
KNOWN = {"kbeta": 0, "adam95": 1, "adam999": 2}
NAMES = {"kbeta": "K-β", "adam95": "Adam 0.95", "adam999": "Adam 0.999"}
OTHERS = (3, 4, 5, 6)
DASHES = {"-": None, "--": "7 3", ":": "2 3", "-.": "8 3 2 3"}


@dataclass(frozen=True)
class Look:
    """A colour, which is a place in `LIGHT` and `DARK`, and a dash as matplotlib names it."""

    colour: int
    dash: str

    @property
    def dasharray(self) -> str | None:
        """The dash as SVG has it."""
        return DASHES[self.dash]


def looks_of(arms: Sequence[str]) -> dict[str, Look]:
    """One look per arm, by its name and its place among those that the paper does not have."""
    out: dict[str, Look] = {}
    dashes, spare = tuple(DASHES), 0
    for name in arms:
        if name in KNOWN:
            out[name] = Look(KNOWN[name], "-")
        else:
            # a new dash with each new colour too, and another one when the colours come round again
            dash = dashes[(1 + spare + spare // len(OTHERS)) % len(dashes)]
            out[name] = Look(OTHERS[spare % len(OTHERS)], dash)
            spare += 1
    return out


def looks(arms: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour and line style per arm, as keywords for matplotlib."""
    return {name: {"color": LIGHT[look.colour], "linestyle": look.dash} for name, look in looks_of(arms).items()}


def label(arm: str) -> str:
    """What people call an optimizer; tables and JSON keep its id.

    >>> label("kbeta"), label("adam95[lr=0.1]"), label("lion")
    ('K-β', 'Adam 0.95 [lr=0.1]', 'lion')
    """
    name, bracket, rest = arm.partition("[")
    return NAMES.get(name, name) + (f" [{rest}" if bracket and name in NAMES else bracket + rest)
