"""Suites of several tuned studies on synthetic endpoints, judged as real ones are: how often what they say is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from kourkoutas.lab.judging.comparing import Judged
from kourkoutas.lab.suites import judging
from kourkoutas.lab.suites.judging import Standing
from tests.lab.simulated_study import CLEAR, Simulation, study

PROBLEMS = 4

KINDS: Mapping[str, Simulation] = {
    "two arms": Simulation(),
    "two arms, flat": Simulation(curvature=2.0),
    "four arms": Simulation(arms=4),
    "one diverged on every problem": Simulation(arms=3, diverged=1),
    "failures that count": Simulation(arms=3, failing=0.1, count_failed=True),
    "edge": Simulation(arms=3, beyond=True),
}


def suite(rng: np.random.Generator, of: Simulation, problems: int = PROBLEMS) -> list[Standing] | None:
    """One suite, every other arm against the last; None where a tuning could choose nothing."""
    *others, baseline = [str(k) for k in range(of.arms)]
    judged: dict[str, Judged] = {}
    for k in range(problems):
        found = study(rng, of, [(arm, baseline) for arm in others])
        if found is None:
            return None
        judged[f"problem {k}"] = found[0]
    return judging.judge(judged, others, baseline, of.margin)


def counts(of: Simulation, suites: int, seed: int = 43) -> Counter[str]:
    """How many of so many suites say what: "across" if any optimizer is clearly ahead or behind over all problems,
    "problem" if any is on any problem, "any" if either; "first" if the first arm is ahead over all problems."""
    rng, found = np.random.default_rng(seed), Counter[str]()
    for _ in range(suites):
        standings = suite(rng, of)
        if standings is None:
            found["stopped"] += 1
            continue
        over = any(one.verdict in CLEAR for one in standings)
        on_one = any(ruling.verdict in CLEAR for one in standings for ruling in one.rulings.values())
        found["across"] += over
        found["problem"] += on_one
        found["any"] += over or on_one
        found["first"] += standings[0].verdict == "better"
        found["equal"] += standings[0].verdict == "equal"
    return found
