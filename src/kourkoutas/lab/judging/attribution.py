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

import itertools
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kourkoutas.lab.judging.comparing import Comparison
from kourkoutas.lab.judging.intervals import Interval, fieller
from kourkoutas.lab.judging.values import Array, Outcomes, Seed
from kourkoutas.lab.optimizers.looks import name_of

BASELINES = ("adam95", "adam999")
TREATMENT = "kbeta"
MEAN, WARMUP, DYNAMICS = "mean of β2", "hidden warmup", "dynamics of β2"


@dataclass(frozen=True)
class Path:
    """From a baseline to kbeta.

    Attributes:
      arms: from first to last.
      causes: of each step between them.
    """

    arms: tuple[str, ...]
    causes: tuple[str, ...]


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
    found = [_of_baseline(baseline, comparison) for baseline in BASELINES]
    return tuple(one for one in found if one is not None)


def _of_baseline(baseline: str, comparison: Comparison) -> Attribution | None:
    """None where no control was run, or where all arms of the paths share fewer than two seeds."""
    values, log = comparison.values, comparison.log
    paths = _paths(baseline, values)
    if not paths:
        return None
    arms = list(dict.fromkeys(itertools.chain.from_iterable(path.arms for path in paths)))
    seeds = _common_seeds([values[arm] for arm in arms])
    if len(seeds) < 2:
        return None
    sign = -1.0 if comparison.higher_is_better else 1.0
    raw = {arm: np.array([values[arm][seed] for seed in seeds]) for arm in arms}
    y = {arm: sign * (np.log10(x) if log else x) for arm, x in raw.items()}
    whole = y[baseline] - y[TREATMENT]
    verdict = _verdict(baseline, comparison)
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
    return Attribution(baseline, tuple(path.arms for path in paths), parts, sentence)


def _common_seeds(arms: Sequence[Mapping[Seed, float]]) -> list[Seed]:
    """The seeds on which every arm has a value, in the order of the first."""
    finished = [{seed for seed, x in by_seed.items() if math.isfinite(x)} for by_seed in arms]
    common = set.intersection(*finished)
    return [seed for seed in arms[0] if seed in common]


def _verdict(baseline: str, comparison: Comparison) -> str:
    """On kbeta against the baseline, whichever of the two the contrast calls the treatment; empty without one."""
    verdicts: dict[tuple[str, str], str] = {(c.treatment, c.baseline): c.verdict for c in comparison.contrasts}
    if (TREATMENT, baseline) in verdicts:
        return verdicts[TREATMENT, baseline]
    other_way = verdicts.get((baseline, TREATMENT), "")
    return {"better": "worse", "worse": "better"}.get(other_way, other_way)


def _paths(baseline: str, values: Outcomes) -> list[Path]:
    """The paths from `baseline` to kbeta over arms that were run, as many steps as can be; none without a control."""
    if baseline not in values or TREATMENT not in values:
        return []
    whole = (
        Path((baseline, "adam-mid", "kbeta-static", TREATMENT), (MEAN, WARMUP, DYNAMICS)),
        Path((baseline, f"{baseline}-warm", "kbeta-static", TREATMENT), (WARMUP, MEAN, DYNAMICS)),
        Path((baseline, "adam-mid", "kbeta-exact", TREATMENT), (MEAN, DYNAMICS, WARMUP)),
    )
    short = dict.fromkeys(_over_arms(path, values) for path in whole)  # without an arm two may be the same
    controlled = [path for path in short if len(path.causes) > 1]
    most = max((len(path.causes) for path in controlled), default=0)
    longest = [path for path in controlled if len(path.causes) == most]
    return [path for path in longest if set(path.causes) == set(longest[0].causes)]


def _over_arms(path: Path, run: Container[str]) -> Path:
    """The path over the arms that were run; an absent arm leaves its step and the next as one."""
    arms, causes, open_causes = [path.arms[0]], [], []
    for arm, cause in zip(path.arms[1:], path.causes, strict=True):
        open_causes.append(cause)
        if arm in run:
            arms.append(arm)
            causes.append(" and ".join(sorted(open_causes)))
            open_causes = []
    return Path(tuple(arms), tuple(causes))


def _parts(y: Mapping[str, Array], paths: Sequence[Path], whole: Array) -> tuple[Part, ...]:
    """The shares of the whole, largest first; none where the t interval of the whole holds 0."""
    causes: dict[str, Array] = {}
    for path in paths:
        for (before, after), cause in zip(itertools.pairwise(path.arms), path.causes, strict=True):
            causes[cause] = causes.get(cause, 0.0) + (y[before] - y[after]) / len(paths)
    parts = []
    for cause, part in causes.items():
        ci = fieller(part, whole)
        if ci is not None:
            parts.append(Part(cause, float(part.mean() / whole.mean()), ci))
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
