"""Which part of a difference between kbeta and Adam comes from what, as far as the control arms show.

Between `adamXX` and `kbeta` stand controls, each of which changes one thing:

    adamXX → adam-mid → kbeta-static → kbeta          the mean of β2, the hidden warmup, the dynamics of β2
    adamXX → adamXX-warm → kbeta-static → kbeta       the hidden warmup, the mean of β2, the dynamics of β2

Along a path the differences add up to the whole, d(adamXX, kbeta), so each cause has a share of it:

    share = mean(d of the step) / mean(d of the whole)

Two paths that separate the same causes are averaged, since neither order is the right one. An absent control leaves
its step and the next as one, "the mean and the dynamics of β2" for example. Where the comparison is on logarithms,
shares are of the logarithm of the ratio.

NOTE: the interval of a share is Fieller's, for a ratio of means that share their seeds. It is bounded exactly where the
t interval of the whole excludes 0; shares of a difference that is not shown are not given.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from kourkoutas.lab.judging.intervals import Interval, fieller
from kourkoutas.lab.judging.values import Array, Seed, Values, in_order
from kourkoutas.lab.specs.looks import label

BASELINES = ("adam95", "adam999")
TREATMENT = "kbeta"
MEAN, WARMUP, DYNAMICS = "mean of β2", "hidden warmup", "dynamics of β2"


@dataclass(frozen=True)
class Part:
    """One cause's share of the whole difference: 0.99 is 99 %. Negative: it acts the other way."""

    cause: str
    share: float
    ci: Interval


@dataclass(frozen=True)
class Attribution:
    """The shares of the difference between kbeta and one baseline, largest first.

    Attributes:
      paths: the arms along which the difference was taken apart.
      seeds: on which every one of those arms ended.
      difference: the whole, mean d.
      parts: empty when the whole difference is not shown on these seeds.
      sentence: all of it for people.
    """

    treatment: str
    baseline: str
    paths: tuple[tuple[str, ...], ...]
    seeds: tuple[Seed, ...]
    difference: float
    parts: tuple[Part, ...]
    sentence: str


class Judged(Protocol):
    """What is asked of a contrast."""

    @property
    def treatment(self) -> str: ...
    @property
    def baseline(self) -> str: ...
    @property
    def verdict(self) -> str: ...


def _verdict(contrasts: Sequence[Judged], baseline: str) -> str | None:
    """Of kbeta against the baseline, whichever of them is the treatment; None where they were not compared."""
    turned = {"better": "worse", "worse": "better"}
    for c in contrasts:
        if (c.treatment, c.baseline) == (TREATMENT, baseline):
            return c.verdict
        if (c.baseline, c.treatment) == (TREATMENT, baseline):
            return turned.get(c.verdict, c.verdict)
    return None


Path = tuple[tuple[str, ...], tuple[str, ...]]  # the arms, and the cause of each step between them


def attribute(
    values: Values, *, log: bool, higher_is_better: bool, contrasts: Sequence[Judged], confidence: float = 0.95
) -> tuple[Attribution, ...]:
    """One attribution per Adam that the controls lead from to kbeta; without shares where its own contrast shows no
    difference, or one on the other side."""
    found = []
    for baseline in BASELINES:
        paths = _paths(baseline, values)
        one = (
            _shares(values, paths, log=log, higher_is_better=higher_is_better, confidence=confidence) if paths else None
        )
        if one is None:
            continue
        verdict, why = _verdict(contrasts, baseline), ""
        if verdict not in ("better", "worse"):
            why = "no clear difference, so there is nothing to take apart"
        elif (one.difference > 0) != (verdict == "better"):
            why = "the mean over the seeds that all controls finished is on the other side, so it is not taken apart"
        told = f"{label(TREATMENT)} against {label(baseline)}: {why}."
        found.append(replace(one, parts=(), sentence=told) if why else one)
    return tuple(found)


def _paths(baseline: str, values: Values) -> list[Path]:
    """The paths from `baseline` to kbeta over arms that were run, as many steps as can be; none without a control."""
    if baseline not in values or TREATMENT not in values:
        return []
    whole: tuple[Path, ...] = (
        ((baseline, "adam-mid", "kbeta-static", TREATMENT), (MEAN, WARMUP, DYNAMICS)),
        ((baseline, f"{baseline}-warm", "kbeta-static", TREATMENT), (WARMUP, MEAN, DYNAMICS)),
        ((baseline, "adam-mid", "kbeta-exact", TREATMENT), (MEAN, DYNAMICS, WARMUP)),
    )
    short: dict[Path, None] = {}
    for arms, causes in whole:
        kept, steps, open_causes = [arms[0]], [], []
        for arm, cause in zip(arms[1:], causes, strict=True):
            open_causes.append(cause)
            if arm in values:
                kept.append(arm)
                steps.append(" and ".join(sorted(open_causes)))
                open_causes = []
        if len(kept) > 2:
            short[tuple(kept), tuple(steps)] = None
    most = max((len(steps) for _, steps in short), default=0)
    longest = [path for path in short if len(path[1]) == most]
    return [path for path in longest if set(path[1]) == set(longest[0][1])]


def _shares(
    values: Values, paths: Sequence[Path], *, log: bool, higher_is_better: bool, confidence: float
) -> Attribution | None:
    arms = list(dict.fromkeys(arm for path, _ in paths for arm in path))
    seeds = in_order(
        seed for seed in values[arms[0]] if all(math.isfinite(values[arm].get(seed, math.nan)) for arm in arms)
    )
    if len(seeds) < 2:
        return None
    raw = {arm: np.array([values[arm][seed] for seed in seeds]) for arm in arms}
    y: Mapping[str, Array] = {arm: np.log10(x) if log else x for arm, x in raw.items()}
    sign = -1.0 if higher_is_better else 1.0
    baseline = paths[0][0][0]
    whole = sign * (y[baseline] - y[TREATMENT])
    causes: dict[str, Array] = {}
    for path, steps in paths:
        for before, after, cause in zip(path, path[1:], steps, strict=False):
            part = sign * (y[before] - y[after]) / len(paths)
            causes[cause] = causes.get(cause, 0.0) + part
    intervals = {cause: fieller(part, whole, confidence) for cause, part in causes.items()}
    parts = tuple(
        sorted(
            (
                Part(cause, float(part.mean() / whole.mean()), ci)
                for cause, part in causes.items()
                if (ci := intervals[cause]) is not None
            ),
            key=lambda part: -part.share,
        )
    )
    shown = tuple(path for path, _ in paths)
    return Attribution(
        treatment=TREATMENT,
        baseline=baseline,
        paths=shown,
        seeds=tuple(seeds),
        difference=float(whole.mean()),
        parts=parts,
        sentence=_sentence(baseline, parts, len(seeds), confidence, log),
    )


def _sentence(baseline: str, parts: Sequence[Part], n: int, confidence: float, log: bool) -> str:
    who = f"{label(TREATMENT)} against {label(baseline)}"
    if not parts:
        return f"{who}: no clear difference on the {n} seeds that all controls finished, so nothing to take apart."
    shares = ", ".join(
        f"{part.cause} {round(100 * part.share)} % [{round(100 * part.ci.low)}, {round(100 * part.ci.high)}]"
        for part in parts
    )
    of = "logarithm of the ratio" if log else "difference"
    return f"{who}: {shares} of the {of} ({100 * confidence:g} % intervals, {n} seeds)."


def summary(found: Sequence[Attribution]) -> list[str]:
    """What stands under the headline: the shares, or in one sentence that there are none."""
    if clear := [one.sentence for one in found if one.parts]:
        return clear
    if len(found) < 2:
        return [one.sentence for one in found]
    others = " and ".join(label(one.baseline) for one in found)
    return [f"{label(TREATMENT)} against {others}: the controls have nothing to take apart."]
