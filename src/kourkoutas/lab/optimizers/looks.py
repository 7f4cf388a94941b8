"""How people see an optimizer: one name, one colour and one dash in every figure, table and sentence.

JSON, CSV and the command line keep the id: "adam95" is "Adam 0.95" here. The paper's three optimizers look the same in
every study. Colours are Okabe and Ito's, told apart with every common kind of colour blindness, darkened or lightened
until they stand out from a white and from a dark page alike; the dash tells optimizers apart in print and in grey.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from kourkoutas.lab.optimizers.rivals import RIVALS

LIGHT = ("#0072B2", "#B97100", "#00805C", "#C94F00", "#A8467F", "#2783B8", "#666666")
DARK = ("#58B4F2", "#F0B03F", "#35C795", "#FF8B50", "#E79CC8", "#9ADBFF", "#B5B5B5")
KNOWN = {"K-β": 0, "Adam 0.95": 1, "Adam 0.999": 2}
# (colour, dash) of two that most studies have, too; others get these colours only when they are not there.
USUAL = {"Adam 0.95 warmed": (3, "--"), "K-β eigen": (4, ":")}
OTHERS = (3, 4, 5, 6)
DASHES = {"-": None, "--": "7 3", ":": "2 3", "-.": "8 3 2 3"}

NAMES = {
    "kbeta": "K-β",
    "kbeta-static": "K-β static",
    "kbeta-exact": "K-β exact",
    "kbeta-fixed": "K-β fixed",
    "kbeta-lbfgs": "K-β, then L-BFGS",
    "kbeta-eigen": "K-β eigen",
    "eigen95": "eigen 0.95",
    "adam90": "Adam 0.9",
    "adam95": "Adam 0.95",
    "adam99": "Adam 0.99",
    "adam999": "Adam 0.999",
    "adam-mid": "Adam mid β2",
    "adam-equal": "Adam 0.95/0.95",
    **{label: rival.name for label, rival in RIVALS.items()},
}
ENDINGS = {"-warm": "warmed", "-nobc": "uncorrected"}


def name_of(arm: str) -> str:
    """What people call an optimizer; a name that is not ours stays as it is.

    >>> name_of("kbeta"), name_of("adam95[lr=0.1]"), name_of("adam999-warm"), name_of("mine-warm[x]")
    ('K-β', 'Adam 0.95 [lr=0.1]', 'Adam 0.999 warmed', 'mine-warm[x]')
    """
    name, bracket, rest = arm.partition("[")
    known = NAMES.get(name, name)
    for ending, word in ENDINGS.items():
        if (base := name.removesuffix(ending)) != name and base in NAMES:
            known = f"{NAMES[base]} {word}"
    return arm if known == name else f"{known} {bracket}{rest}".rstrip()


def versus(treatment: str, baseline: str) -> str:
    """A contrast for people: "K-β vs Adam 0.95"."""
    return f"{name_of(treatment)} vs {name_of(baseline)}"


@dataclass(frozen=True)
class Look:
    """A colour, which is a place in `LIGHT` and `DARK`, and a dash as matplotlib names it.

    Attributes:
      name: the optimizer's name for people.
    """

    colour: int
    dash: str
    name: str = field(compare=False)

    @property
    def dasharray(self) -> str | None:
        """The dash as SVG has it."""
        return DASHES[self.dash]


def looks_of(arms: Sequence[str]) -> dict[str, Look]:
    """One look per arm, given by id or by name, and by its place among those that the paper does not have."""
    out: dict[str, Look] = {}
    names = [name_of(arm) for arm in arms]
    taken = [USUAL[name][0] for name in names if name in USUAL]
    free = [colour for colour in OTHERS if colour not in taken]
    dashes, spare = tuple(DASHES), 0
    for arm, name in zip(arms, names, strict=True):
        if name in KNOWN:
            out[arm] = Look(KNOWN[name], "-", name)
        elif name in USUAL:
            out[arm] = Look(*USUAL[name], name)
        else:
            # a new dash with each new colour too, and another one when the pairs come round again
            dash = dashes[(1 + spare + spare // math.lcm(len(free), len(dashes))) % len(dashes)]
            out[arm] = Look(free[spare % len(free)], dash, name)
            spare += 1
    return out


def looks(arms: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour and line style per arm, as keywords for matplotlib."""
    return {arm: {"color": LIGHT[look.colour], "linestyle": look.dash} for arm, look in looks_of(arms).items()}
