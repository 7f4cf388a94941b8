"""The answer of a suite: made once, from the folders of its studies; console, JSON, Python and page are views of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kourkoutas.lab.errors import unknown
from kourkoutas.lab.judging import endpoints
from kourkoutas.lab.judging.analysis import Analysis, ArmSummary, analyse
from kourkoutas.lab.judging.headline import digits, listed
from kourkoutas.lab.judging.intervals import quantile
from kourkoutas.lab.judging.statistics import Finding, between
from kourkoutas.lab.judging.verdicts import Verdict
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.planning.contrasts import LEVEL
from kourkoutas.lab.results.export import names_in
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.suites import across, judging
from kourkoutas.lab.suites.judging import Standing

RULE = (
    "Over all problems an optimizer is judged by the geometric mean of its ratios to {baseline}, in which every "
    "problem counts alike; its interval is a paired bootstrap of the seeds within each problem. A difference is clear "
    "where p is below {level:.2g} after Holm's adjustment for all {family} statements of the suite: {optimizers} on "
    "each of {problems} and over all of them{counted}. Intervals hold together at 95 %.{margin} A run that diverged "
    "has no ratio and counts as the worst end that any run of its problem reached. The answer speaks of these problems."
)
COUNTED = ", with what an optimizer may have lost by the luck of its tuning counted"
MARGIN = " Equal within {margin:g} %: the interval lies inside ±{margin:g} %."


@dataclass(frozen=True)
class Row:
    """One optimizer on one problem.

    Attributes:
      chosen: {option: value} that the tuning gave it.
      median, q1, q3: of its ends, with diverged runs as the worst.
      better: percent by which it is better than the baseline, as its study says it; None for the baseline itself.
      wins, seeds: on how many of how many seeds it is better.
      p_study: after Holm within the study, every optimizer against the baseline on the study's endpoints.
      verdict, p_holm: within the suite.
      ratio: geometric mean of its ratios to the baseline.
      reached, runs: how many of how many runs got to the baseline's median end.
      steps: median until then; infinite where fewer than half of the runs got there; None where nothing was logged.
      share: `steps` as a part of the baseline's own.
    """

    optimizer: str
    chosen: Mapping[str, float]
    median: float | None
    q1: float | None
    q3: float | None
    better: Finding | None
    wins: int | None
    seeds: int | None
    p_study: float | None
    verdict: Verdict | None
    p_holm: float | None
    ratio: float | None
    diverged: int
    failed: int
    seconds_per_step: float | None
    reached: int | None
    runs: int | None
    steps: float | None
    share: float | None


@dataclass(frozen=True)
class Problem:
    """One study of a suite.

    Attributes:
      folder: where its results and its page are.
      title: of the endpoint that decides.
      aim: the baseline's median end, to which the others are timed.
      rows: the best median first.
    """

    name: str
    folder: str
    title: str
    higher_is_better: bool
    finished: bool
    state: str
    fairness: tuple[str, ...]
    aim: float | None
    rows: tuple[Row, ...]

    def row(self, optimizer: str) -> Row:
        return next(row for row in self.rows if row.optimizer == optimizer)


@dataclass(frozen=True)
class SuiteAnalysis:
    """What a suite shows.

    Attributes:
      finished: whether every run of every study has ended. Before that nothing is compared.
      headline: the answer in a few sentences.
      answers: one sentence per optimizer, with its numbers.
      optimizers: all of them, the baseline too.
      standings: every other optimizer beside the baseline, the best ratio first.
      profile: {optimizer: its factors of the best of each problem, in order}: it is within a factor of the best on the
        share of problems whose factor is not above it.
      notes: optimizers and problems that are no part of the answer, and why.
      studies: {problem: its analysis}. Not part of the JSON.
    """

    name: str
    about: str
    baseline: str
    margin: float | None
    family: int
    finished: bool
    headline: str
    rule: str
    answers: tuple[str, ...]
    optimizers: tuple[str, ...]
    problems: tuple[Problem, ...]
    standings: tuple[Standing, ...]
    profile: Mapping[str, Sequence[float]]
    notes: tuple[str, ...]
    studies: Mapping[str, Analysis] = field(repr=False)

    def standing(self, optimizer: str) -> Standing | None:
        return next((one for one in self.standings if one.optimizer == optimizer), None)


def analyse_suite(
    snapshots: Mapping[str, Snapshot],
    *,
    baseline: str | None = None,
    name: str = "suite",
    about: str = "",
    margin: float | None = None,
    missing: Sequence[str] = (),
) -> SuiteAnalysis:
    """What the studies of a suite show together.

    Args:
      snapshots: {problem: its results folder, as it was read}.
      baseline: the optimizer that the others are compared with; by default the second.
      margin: percent within which a difference does not matter, instead of what the studies declared.
      missing: studies that have not begun.
    """
    arms, left_out = _shared_arms(snapshots)
    if baseline is None:
        baseline = arms[1]
    elif baseline not in arms:
        raise unknown("baseline", baseline, arms)
    studies = {
        key: analyse(snapshot, baseline=baseline, margin=margin, resamples=0) for key, snapshot in snapshots.items()
    }
    if margin is None:
        margin = _declared_margin(studies.values())
    others = [arm for arm in arms if arm != baseline]
    finished = not missing and all(one.finished for one in studies.values())
    standings = _standings(studies, others, baseline, margin) if finished else []
    by_arm = {one.optimizer: one for one in standings}
    problems = tuple(_problem(key, one, arms, baseline, by_arm) for key, one in studies.items())
    family = judging.family_of(len(others), len(problems)).size
    tuned = any(one.snapshot.record.tuning is not None for one in studies.values())
    return SuiteAnalysis(
        name=name,
        about=about,
        baseline=baseline,
        margin=margin,
        family=family,
        finished=finished,
        headline=_headline(standings, studies, missing, baseline, margin),
        rule=_rule(baseline, others, len(problems), family, tuned, margin),
        answers=tuple(answer(one, baseline, len(problems), margin) for one in standings),
        optimizers=tuple(arms),
        problems=problems,
        standings=tuple(standings),
        profile=_profile(problems) if finished else {},
        notes=(*left_out, *_notes(standings)),
        studies=studies,
    )


def _shared_arms(snapshots: Mapping[str, Snapshot]) -> tuple[list[str], list[str]]:
    """(the optimizers that every study has, what is said of the others)."""
    labels = {key: [arm.label for arm in one.record.arms] for key, one in snapshots.items()}
    first = next(iter(labels.values()))
    shared = [arm for arm in first if all(arm in own for own in labels.values())]
    if len(shared) < 2:
        have = "; ".join(f"{key}: {', '.join(own)}" for key, own in labels.items())
        raise ValueError(
            f"the studies have fewer than two optimizers in common, so there is nothing to answer ({have})"
        )
    told = []
    for arm in names_in(labels.values()):
        if arm not in shared:
            where = [key for key, own in labels.items() if arm in own]
            told.append(f"{name_of(arm)} is in {listed(where)} only, and no part of the answer over all problems.")
    return shared, told


def _declared_margin(studies: Iterable[Analysis]) -> float | None:
    """The margin that all studies declared; None where they differ."""
    declared = {one.snapshot.record.margin for one in studies}
    return declared.pop() if len(declared) == 1 else None


def _standings(
    studies: Mapping[str, Analysis], others: Sequence[str], baseline: str, margin: float | None
) -> list[Standing]:
    """The best ratio first."""
    primary = {name: one.judged[0] for name, one in studies.items()}
    standings = judging.judge(primary, others, baseline, margin)
    return sorted(standings, key=lambda one: math.inf if one.ratio is None else one.ratio)


def _profile(problems: Sequence[Problem]) -> dict[str, list[float]]:
    """{optimizer: its factors of the best}, by its median end on each problem."""
    typical = {one.name: {row.optimizer: _number(row.median) for row in one.rows} for one in problems}
    higher = {one.name: one.higher_is_better for one in problems}
    return across.profile(typical, higher)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _problem(
    name: str, study: Analysis, arms: Sequence[str], baseline: str, standings: Mapping[str, Standing]
) -> Problem:
    summaries = {arm.label: arm for arm in study.arms}
    aim = summaries[baseline].median
    times = _times(study, aim)
    own_steps = _own_steps(study, baseline)
    rows = [_row(name, study, summaries[arm], standings.get(arm), times.get(arm), own_steps) for arm in arms]
    sign = -1 if study.primary.higher_is_better else 1
    rows.sort(key=lambda row: (row.median is None, sign * (row.median or 0.0)))
    return Problem(
        name=name,
        folder=str(study.snapshot.path),
        title=study.primary.title,
        higher_is_better=study.primary.higher_is_better,
        finished=study.finished,
        state="finished" if study.finished else study.headline,
        fairness=study.fairness,
        aim=aim,
        rows=tuple(rows),
    )


def _row(
    problem: str,
    study: Analysis,
    arm: ArmSummary,
    standing: Standing | None,
    times: Sequence[float] | None,
    own_steps: float | None,
) -> Row:
    contrast = next((c for c in study.primary.contrasts if c.treatment == arm.label), None)
    ruling = None if standing is None else standing.rulings[problem]
    steps = None if not times else quantile(np.array(times), 0.5)
    return Row(
        optimizer=arm.label,
        chosen=arm.chosen,
        median=arm.median,
        q1=arm.q1,
        q3=arm.q3,
        better=None if contrast is None else contrast.percent,
        wins=None if contrast is None else contrast.wins,
        seeds=None if contrast is None else contrast.n,
        p_study=None if contrast is None else contrast.p_holm,
        verdict=None if ruling is None else ruling.verdict,
        p_holm=None if ruling is None else ruling.p_holm,
        ratio=None if standing is None else standing.ratios.get(problem),
        diverged=arm.diverged,
        failed=arm.failed,
        seconds_per_step=arm.seconds_per_step,
        reached=None if times is None else sum(map(math.isfinite, times)),
        runs=None if times is None else len(times),
        steps=steps,
        share=None if steps is None or own_steps is None else steps / own_steps,
    )


def _metric(study: Analysis) -> str | None:
    """The logged metric that the deciding endpoint is the end of; None for a returned number."""
    record = study.snapshot.record
    return record.code.endpoint if record.code is not None else endpoints.declared(record)[0].metric


def _times(study: Analysis, aim: float | None) -> dict[str, list[float]]:
    """{optimizer: steps of each run until it is as good as `aim`}, infinite for one that never is; empty where nobody
    logged the metric. A run that diverged counts by what it logged before."""
    metric, higher = _metric(study), study.primary.higher_is_better
    if metric is None or aim is None or not math.isfinite(aim):
        return {}
    found: dict[str, list[float]] = {}
    logged = False
    for run in study.snapshot.runs:
        if run.result is None or run.result.status == "failed":
            continue
        course = endpoints.logged(run, metric)
        logged = logged or bool(course)
        good = [step for step, value in course if (value >= aim if higher else value <= aim)]
        found.setdefault(run.spec.optimizer, []).append(min(good, default=math.inf))
    return found if logged else {}


def _own_steps(study: Analysis, baseline: str) -> float | None:
    """How many steps the baseline's runs take."""
    metric = _metric(study)
    if metric is None:
        return None
    lasts = []
    for run in study.snapshot.runs:
        if run.spec.optimizer == baseline and run.result is not None and (course := endpoints.logged(run, metric)):
            lasts.append(course[-1][0])
    return max(lasts, default=None)


# Words


def problems_words(count: int) -> str:
    return "this problem" if count == 1 else f"these {count} problems"


def ratio_words(one: Standing) -> str:
    """The ratio with its interval: "0.88 [0.81, 0.97]"."""
    if one.ratio is None:
        return "–"
    text = _times_text(one.ratio)
    if one.interval is None:
        return text
    return f"{text} [{between(one.interval.low, one.interval.high, _times_text)}]"


def _times_text(ratio: float) -> str:
    """A ratio with as many digits as tell it from 1.

    >>> _times_text(0.9712), _times_text(0.0712), _times_text(1.25), _times_text(31.4)
    ('0.971', '0.0712', '1.25', '31.4')
    """
    return f"{ratio:.3g}" if ratio < 10 else digits(ratio) if ratio >= 100 else f"{ratio:.1f}"


def answer(one: Standing, baseline: str, problems: int, margin: float | None) -> str:
    """One optimizer in full."""
    who, other, over = name_of(one.optimizer), name_of(baseline), problems_words(problems)
    within = "the margin" if margin is None else f"{margin:g} %"
    said = {
        "better": f"{who} is clearly ahead of {other} over {over}",
        "worse": f"{who} is clearly behind {other} over {over}",
        "equal": f"{who} and {other} are equal within {within} over {over}",
        "unclear": f"No clear difference between {who} and {other} over {over}",
        "identical": f"{who} and {other} end alike on {over}",
        "untested": f"{who} against {other}: no verdict over {over}, {one.why}",
        "unfinished": f"{who} against {other}: no verdict yet over {over}, {one.why}",
    }[one.verdict]
    p = f"p = {one.p_holm:.2g}" if one.p_holm is not None else ""
    facts = "; ".join(part for part in (f"ratio {ratio_words(one)}", p) if part and one.ratio is not None)
    return f"{said}{f' ({facts})' if facts else ''}: {where_words(one)}."


def where_words(one: Standing) -> str:
    """On which problems it is ahead, equal, behind and diverging."""
    words: dict[Verdict, str] = {
        "better": "clearly ahead on",
        "equal": "equal within the margin on",
        "worse": "clearly behind on",
        "unclear": "not clearly different on",
        "identical": "the same on",
        "untested": "no verdict on",
        "unfinished": "no verdict yet on",
    }
    parts = []
    for verdict, text in words.items():
        names = [name for name, ruling in one.rulings.items() if ruling.verdict == verdict]
        if names:
            parts.append(f"{text} {listed(names)}")
    if one.diverged:
        lost = [f"{name} ({count})" for name, count in one.diverged.items()]
        parts.append(f"runs diverged on {listed(lost)}")
    return ", ".join(parts)


def _headline(
    standings: Sequence[Standing],
    studies: Mapping[str, Analysis],
    missing: Sequence[str],
    baseline: str,
    margin: float | None,
) -> str:
    """The answer, or why there is none yet."""
    if not standings:
        done, every = sum(one.finished for one in studies.values()), len(studies) + len(missing)
        return f"{done} of {every} studies have finished. The answer over all of them comes when all have."
    over, other = problems_words(len(studies)), name_of(baseline)
    groups: dict[Verdict, list[Standing]] = {}
    for one in standings:
        groups.setdefault(one.verdict, []).append(one)
    lines = []
    for verdict, word in (("better", "ahead of"), ("worse", "behind")):
        if own := groups.get(verdict):  # type: ignore[call-overload]
            named = listed([f"{name_of(one.optimizer)} (ratio {_times_text(one.ratio or 1.0)})" for one in own])
            lines.append(f"{named} {'is' if len(own) == 1 else 'are'} clearly {word} {other} over {over}.")
    if equal := groups.get("equal"):
        named = listed([name_of(one.optimizer) for one in equal])
        lines.append(f"{named} {'is' if len(equal) == 1 else 'are'} equal to it within {margin:g} %.")
    if unclear := groups.get("unclear"):
        named = listed([name_of(one.optimizer) for one in unclear])
        rest = "" if lines else f" from {other} over {over}"
        lines.append(f"{named} {'is' if len(unclear) == 1 else 'are'} not clearly different{rest}.")
    if none := [*groups.get("untested", ()), *groups.get("unfinished", ())]:
        named = listed([f"{name_of(one.optimizer)} ({one.why})" for one in none])
        lines.append(f"No verdict over {over} on {named}.")
    if same := groups.get("identical"):
        lines.append(f"{listed([name_of(one.optimizer) for one in same])} and {other} end alike.")
    return " ".join(lines)


def _rule(baseline: str, others: Sequence[str], problems: int, family: int, tuned: bool, margin: float | None) -> str:
    return RULE.format(
        baseline=name_of(baseline),
        level=LEVEL,
        family=family,
        optimizers="1 optimizer" if len(others) == 1 else f"{len(others)} optimizers",
        problems="1 problem" if problems == 1 else f"{problems} problems",
        counted=COUNTED if tuned else "",
        margin="" if margin is None else MARGIN.format(margin=margin),
    )


def _notes(standings: Sequence[Standing]) -> list[str]:
    """Which problems have no ratio, and are left out of whose mean."""
    about: dict[tuple[str, str], list[str]] = {}
    for one in standings:
        for name, why in one.without.items():
            about.setdefault((name, why), []).append(name_of(one.optimizer))
    return [f"{name} has no part in the mean of {listed(who)}: {why}." for (name, why), who in about.items()]


def snapshots_of(folders: Sequence[Path]) -> dict[str, Snapshot]:
    """{folder's name: what it holds}, of single studies that are to be answered together."""
    found: dict[str, Snapshot] = {}
    for folder in folders:
        if folder.name in found:
            raise ValueError(f"two folders are called {folder.name!r}; their names tell the problems apart")
        found[folder.name] = Snapshot.read(folder)
    return found
