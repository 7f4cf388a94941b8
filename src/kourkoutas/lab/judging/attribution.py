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

import numpy as np
from scipy import special

from kourkoutas.lab.judging.intervals import Interval, unit_of
from kourkoutas.lab.judging.values import Array, Seed, Values, in_order

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


def only_shown(
    found: Sequence[Attribution], verdicts: Mapping[tuple[str, str], str], *, all_judged: bool = False
) -> tuple[Attribution, ...]:
    """The attributions, without the shares of a difference that its own contrast does not show.

    Args:
      found: as `attribute` gives them.
      verdicts: {(treatment, baseline): verdict} of the contrasts.
      all_judged: a pair of arms without a verdict is not shown either; else its shares stay.
    """
    turned = {"better": "worse", "worse": "better"}
    kept = []
    for one in found:
        pair = one.treatment, one.baseline
        verdict = verdicts.get(pair)
        if verdict is None and pair[::-1] in verdicts:
            verdict = turned.get(verdicts[pair[::-1]], "unclear")
        why = ""
        if verdict not in turned and (verdict is not None or all_judged):
            why = "no difference is shown, so there is nothing to take apart"
        elif verdict in turned and (one.difference > 0) != (verdict == "better"):
            why = "the mean over the seeds that all controls finished is on the other side, so it is not taken apart"
        kept.append(replace(one, parts=(), sentence=f"{pair[0]} against {pair[1]}: {why}.") if why else one)
    return tuple(kept)


Path = tuple[tuple[str, ...], tuple[str, ...]]  # the arms, and the cause of each step between them


def attribute(
    values: Values, *, log: bool = False, higher_is_better: bool = False, confidence: float = 0.95
) -> tuple[Attribution, ...]:
    """One attribution per Adam that the controls lead from to kbeta."""
    found = []
    for baseline in BASELINES:
        paths = _paths(baseline, values)
        if paths:
            one = _shares(values, paths, log=log, higher_is_better=higher_is_better, confidence=confidence)
            found += [] if one is None else [one]
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
    unit = 1.0 if log else unit_of(*raw.values())
    y: Mapping[str, Array] = {arm: np.log10(x) if log else x / unit for arm, x in raw.items()}
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
        difference=float(whole.mean()) * unit,
        parts=parts,
        sentence=_sentence(baseline, parts, len(seeds), confidence, log),
    )


def fieller(part: Array, whole: Array, confidence: float = 0.95) -> Interval | None:
    """The interval of mean(part)/mean(whole): all ρ with |mean(part - ρ·whole)| ≤ t·sd(part - ρ·whole)/√n.

    Squared, that is a quadratic in ρ; it is bounded when mean(whole) differs from 0 by its own t interval.
    """
    n = len(whole)
    a, w = float(part.mean()), float(whole.mean())
    (s_aa, s_aw), (_, s_ww) = np.cov(part, whole) / n
    t2 = float(special.stdtrit(n - 1, (1 + confidence) / 2)) ** 2
    # (w² - t²·s_ww)·ρ² - 2·(a·w - t²·s_aw)·ρ + (a² - t²·s_aa) ≤ 0
    square, half, rest = w * w - t2 * s_ww, a * w - t2 * s_aw, a * a - t2 * s_aa
    if not square > 0:
        return None
    root = math.sqrt(max(half * half - square * rest, 0.0))
    return Interval((half - root) / square, (half + root) / square, "Fieller")


def _sentence(baseline: str, parts: Sequence[Part], n: int, confidence: float, log: bool) -> str:
    if not parts:
        return (
            f"{TREATMENT} against {baseline}: on the {n} seeds that all controls finished no difference is shown, so "
            "there is nothing to take apart."
        )
    level = f"{100 * confidence:g} %"
    shares = ", ".join(
        f"{part.cause} {100 * part.share:.0f} % [{100 * part.ci.low:.0f}, {100 * part.ci.high:.0f}]" for part in parts
    )
    of = "logarithm of the ratio" if log else "difference"
    return f"{TREATMENT} against {baseline}, shares of the {of} with {level} intervals, {n} seeds: {shares}."
