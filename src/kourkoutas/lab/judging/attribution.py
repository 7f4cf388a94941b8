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
from dataclasses import dataclass

import numpy as np

from kourkoutas.lab.judging.comparing import Comparison
from kourkoutas.lab.judging.intervals import Interval, fieller
from kourkoutas.lab.judging.values import Array, Outcomes
from kourkoutas.lab.optimizers.looks import name_of

BASELINES = ("adam95", "adam999")
TREATMENT = "kbeta"
MEAN, WARMUP, DYNAMICS = "mean of β2", "hidden warmup", "dynamics of β2"

Path = tuple[tuple[str, ...], tuple[str, ...]]  # the arms, and the cause of each step between them


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
      parts: empty when the whole difference is not shown on the seeds that all of those arms finished.
      sentence: all of it for people.
    """

    baseline: str
    paths: tuple[tuple[str, ...], ...]
    parts: tuple[Part, ...]
    sentence: str


def attribute(comparison: Comparison) -> tuple[Attribution, ...]:
    """One attribution per Adam that the controls lead from to kbeta; without shares where its own contrast shows no
    difference, or one on the other side; none where nothing was compared."""
    if not comparison.contrasts and not comparison.missing:
        return ()
    values, log = comparison.values, comparison.log
    verdicts: dict[tuple[str, str], str] = {(c.treatment, c.baseline): c.verdict for c in comparison.contrasts}
    sign = -1.0 if comparison.higher_is_better else 1.0
    turned = {"better": "worse", "worse": "better"}
    found = []
    for baseline in BASELINES:
        paths = _paths(baseline, values)
        arms = list(dict.fromkeys(arm for path, _ in paths for arm in path))
        seeds = [s for s in values.get(baseline, ()) if all(math.isfinite(values[a].get(s, math.nan)) for a in arms)]
        if not paths or len(seeds) < 2:
            continue
        raw = {arm: np.array([values[arm][seed] for seed in seeds]) for arm in arms}
        y = {arm: sign * (np.log10(x) if log else x) for arm, x in raw.items()}
        whole = y[baseline] - y[TREATMENT]
        other_way = verdicts.get((baseline, TREATMENT), "")
        verdict = verdicts.get((TREATMENT, baseline), turned.get(other_way, other_way))
        parts: tuple[Part, ...] = ()
        if verdict == "unfinished":
            told = "a run failed, so the difference is not taken apart"
        elif verdict not in ("better", "worse"):
            told = "no clear difference, so there is nothing to explain"
        elif (whole.mean() > 0) != (verdict == "better"):
            told = "the mean over the seeds that all controls finished is on the other side, so it is not taken apart"
        elif parts := _parts(y, paths, whole):
            of = "logarithm of the ratio" if log else "difference"
            told = f"{', '.join(map(_words, parts))} of the {of} (95 % intervals, {len(seeds)} seeds)"
        else:
            told = f"no clear difference on the {len(seeds)} seeds that all controls finished: nothing to explain"
        sentence = f"{name_of(TREATMENT)} against {name_of(baseline)}: {told}."
        found.append(Attribution(baseline, tuple(path for path, _ in paths), parts, sentence))
    return tuple(found)


def _paths(baseline: str, values: Outcomes) -> list[Path]:
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


def _parts(y: Mapping[str, Array], paths: Sequence[Path], whole: Array) -> tuple[Part, ...]:
    """The shares of the whole, largest first; none where the t interval of the whole holds 0."""
    causes: dict[str, Array] = {}
    for path, steps in paths:
        for before, after, cause in zip(path, path[1:], steps, strict=False):
            causes[cause] = causes.get(cause, 0.0) + (y[before] - y[after]) / len(paths)
    parts = [
        Part(cause, float(part.mean() / whole.mean()), ci)
        for cause, part in causes.items()
        if (ci := fieller(part, whole)) is not None
    ]
    return tuple(sorted(parts, key=lambda part: -part.share))


def _words(part: Part) -> str:
    return f"{part.cause} {round(100 * part.share)} % [{round(100 * part.ci.low)}, {round(100 * part.ci.high)}]"


def summary(found: Sequence[Attribution]) -> list[str]:
    """What stands under the headline: the shares, or in one sentence that there are none."""
    if clear := [one.sentence for one in found if one.parts]:
        return clear
    if len(found) < 2:
        return [one.sentence for one in found]
    others = " and ".join(name_of(one.baseline) for one in found)
    return [f"{name_of(TREATMENT)} against {others}: no clear difference, so there is nothing to explain."]
