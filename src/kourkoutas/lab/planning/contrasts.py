"""Which arms of a study are compared, and how many statements that makes: planned by how the study was asked for, never
by its results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kourkoutas.lab.optimizers import recipes
from kourkoutas.lab.specs.spec import Arm

LEVEL = 0.05  # the most that all statements of a study together may be wrong, of equal optimizers


@dataclass(frozen=True)
class Family:
    """The m statements that the headline of a study may make: every planned contrast on every declared endpoint.

    They share the level. Holm (1979) adjusts their p; their intervals are simultaneous by Bonferroni, each at

        1 - 0.05/m

    Without a difference, each of n pairs is on either side with the same chance, so that all n are on one side with
    probability 2·2^-n = 2^(1-n). No exact test of n pairs has a smaller two-sided p. A t test may, by trusting the
    normal distribution further than so few pairs show it. A verdict therefore needs pairs enough that signs alone
    could give it:

        m·2^(1-n) ≤ 0.05
    """

    contrasts: int
    endpoints: int = 1

    @property
    def size(self) -> int:
        """m."""
        return max(1, self.contrasts * self.endpoints)

    @property
    def confidence(self) -> float:
        """Of each interval, so that all m hold together with probability 0.95."""
        return 1 - LEVEL / self.size

    def smallest_p(self, pairs: int) -> float:
        """The smallest adjusted p that the signs of so many pairs can give."""
        return min(1.0, self.size * 2.0 ** (1 - pairs))

    @property
    def least_pairs(self) -> int:
        """The fewest pairs that can give a verdict."""
        return 1 + math.ceil(math.log2(self.size / LEVEL))

    def can_judge(self, pairs: int) -> bool:
        return pairs >= self.least_pairs

    def words(self) -> str:
        """
        >>> Family(2, 3).words(), Family(1, 1).words()
        ('2 comparisons × 3 endpoints', '1 comparison')
        """
        compared = f"{self.contrasts} comparison{'' if self.contrasts == 1 else 's'}"
        return compared if self.endpoints == 1 else f"{compared} × {self.endpoints} endpoints"


def contrasts(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """(treatment, baseline) pairs: the first optimizer against the others, or, with one optimizer only, its first arm
    against the rest. Controls ask why, not whether, and are left out unless there is nothing else.

    NOTE: a grid is not a cross product of contrasts. Arms of a grid over settings meet their like: kbeta[lr=0.1] meets
    adam95[lr=0.1] and no other learning rate. Where only one optimizer has a grid of its own, each of its arms meets
    the other's arm; where both have, the first arm of each meets all arms of the other. So there are about as many
    contrasts as arms.
    """
    by_optimizer: dict[str, list[Arm]] = {}
    for arm in arms:
        by_optimizer.setdefault(arm.optimizer, []).append(arm)
    if not by_optimizer:
        return []
    first, *others = by_optimizer
    baselines = [name for name in others if name not in recipes.CONTROLS] or others
    pairs: list[tuple[str, str]] = []
    for name in baselines:
        pairs += _between(by_optimizer[first], by_optimizer[name])
    if not pairs:
        lead, *rest = arms
        return [(lead.label, arm.label) for arm in rest]
    order = {arm.label: i for i, arm in enumerate(arms)}
    return sorted(pairs, key=lambda pair: (order[pair[0]], order[pair[1]]))


def _between(treatments: list[Arm], baselines: list[Arm]) -> list[tuple[str, str]]:
    """The pairs of two optimizers' arms."""
    if len(treatments) == 1 or len(baselines) == 1:
        return list(itertools.product([arm.label for arm in treatments], [arm.label for arm in baselines]))
    alike: dict[str, list[Arm]] = {}
    for arm in baselines:
        alike.setdefault(_settings(arm), []).append(arm)
    pairs: dict[tuple[str, str], None] = {}
    met: set[str] = set()
    for arm in treatments:
        same = alike.get(_settings(arm), [])
        # Of several with the same settings, which differ in their own options: the first meets all, the others one.
        for other in same if _settings(arm) not in met else same[:1]:
            pairs[arm.label, other.label] = None
        met.add(_settings(arm))
    return list(pairs)


def _settings(arm: Arm) -> str:
    return repr(sorted(arm.settings.items()))
