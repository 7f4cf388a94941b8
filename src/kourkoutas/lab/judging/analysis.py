"""The analysis of a study: one, for the command line, Python and the report.

    analyse(study)                              the declared endpoints
    analyse(study, endpoints=["val_acc:max"])   the primary one, and others asked for afterwards

An `Analysis` holds plain values and the sentences to print; `to_dict()` is the same for JSON.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kourkoutas.lab.judging import confirming, planned, power, stats, tuned, verdicts
from kourkoutas.lab.judging import endpoints as judged_by
from kourkoutas.lab.judging.attribution import Attribution, attribute, only_shown
from kourkoutas.lab.judging.endpoints import Measure
from kourkoutas.lab.judging.intervals import quantile
from kourkoutas.lab.judging.power import Detectable
from kourkoutas.lab.judging.sensitivity import Sensitivity
from kourkoutas.lab.judging.stats import Comparison, Contrast, all_notes
from kourkoutas.lab.judging.targets import Target
from kourkoutas.lab.judging.values import Seed, Values, all_positive, check_known, listed, plain
from kourkoutas.lab.planning.search import Tried
from kourkoutas.lab.results.store import StoredRun, Study
from kourkoutas.lab.specs import optimizers as recipes
from kourkoutas.lab.specs.spec import RunResult

ENDS = ("ok", "diverged", "failed", "unfinished")


@dataclass(frozen=True)
class ArmSummary:
    """One arm's runs. Median and quartiles are of the primary endpoint with diverged runs as the worst (infinite).

    Attributes:
      role: "treatment", "baseline" or "control".
      seconds: median of a run.
      seconds_per_step: median over the runs that recorded it; None when none did.
      times: medians of what the time was spent on: setup, data, compile, train, evaluate.
      chosen: {option: value} that the tuning gave it.
    """

    label: str
    optimizer: str
    role: str
    runs: int
    ok: int
    diverged: int
    failed: int
    unfinished: int
    median: float | None
    q1: float | None
    q3: float | None
    mean: float | None
    seconds: float | None
    seconds_per_step: float | None
    times: Mapping[str, float]
    chosen: Mapping[str, float]


@dataclass(frozen=True)
class Finding:
    """One planned contrast on one endpoint, in the words and numbers of a first screen.

    Attributes:
      verdict: "better", "worse", "unclear", "identical" or "untested", by the one rule: see `verdicts`.
      answer: "Yes", "No", "Not shown", "No difference" or "Cannot tell".
      percent: how much better the treatment is, in percent of the baseline, with its 95 % interval; negative for worse.
      effect: geometric-mean ratio (log) or mean difference, with its interval; speaks for the treatment when large.
      p, p_holm: of the test named in `test`, before and after Holm's adjustment for `family` contrasts.
      detectable: what difference these seeds could have shown; None where the luck of a tuning is counted.
      contrast: everything else, every pair and every test among it.
    """

    treatment: str
    baseline: str
    verdict: str
    answer: str
    sentence: str
    percent: float | None
    percent_low: float | None
    percent_high: float | None
    effect: float | None
    effect_low: float | None
    effect_high: float | None
    test: str
    p: float | None
    p_holm: float | None
    family: int
    n: int
    wins: int
    ties: int
    losses: int
    diverged_treatment: int
    diverged_baseline: int
    detectable: Detectable | None
    notes: tuple[str, ...]
    contrast: Contrast = dataclasses.field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without `contrast`."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "contrast"}
        found: dict[str, Any] = plain(own)
        return found


@dataclass(frozen=True)
class Judged:
    """One endpoint: its contrasts, its attribution and its notes.

    Attributes:
      name: as it can be asked for again with --endpoint.
      primary: whether it decides the study. All others are secondary.
      declared: whether it was named before the runs were made.
      log: compared as ratios, on log10.
      values: arm → seed → value; NaN for a diverged run.
      comparison: None when no two arms of a contrast share a seed.
      missing: planned pairs that could not be compared.
    """

    name: str
    title: str
    primary: bool
    declared: bool
    log: bool
    maximize: bool
    threshold: float | None
    values: Values
    findings: tuple[Finding, ...]
    attribution: tuple[Attribution, ...]
    missing: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    comparison: Comparison | None = dataclasses.field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without `comparison` and the `contrast` of each finding."""
        light = dataclasses.replace(self, comparison=None, findings=())
        out: dict[str, Any] = plain(light)
        del out["comparison"]
        return out | {"findings": [finding.to_dict() for finding in self.findings]}


@dataclass(frozen=True)
class Analysis:
    """What a study shows.

    Attributes:
      rule: the one rule that the headline follows.
      fairness: how the arms came by their learning rates, and which of them are no comparison at all.
      headline: one sentence per contrast of the primary endpoint, with its answer in front.
      arms: in the order of the study.
      endpoints: the primary one first.
      sensitivity: of each arm to the tuned option, on the tuning seeds; empty unless one option was tuned.
      notes: about the study as a whole, missing pairs and unreadable runs among them.
      tried: {arm: what its tuning runs gave}; empty unless the study was tuned. Not part of `to_dict`.
    """

    testbed: str
    confidence: float
    seeds: tuple[Seed, ...]
    rule: str
    fairness: tuple[str, ...]
    headline: tuple[str, ...]
    arms: tuple[ArmSummary, ...]
    endpoints: tuple[Judged, ...]
    sensitivity: tuple[Sensitivity, ...]
    notes: tuple[str, ...]
    tried: Mapping[str, Sequence[Tried]] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def primary(self) -> Judged:
        return self.endpoints[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite become the strings "nan", "inf" and "-inf".

        Pairs and the tests that do not decide are in `comparisons()`.
        """
        light = dataclasses.replace(self, endpoints=(), tried={})
        out: dict[str, Any] = plain(light)
        del out["tried"]
        return out | {"endpoints": [judged.to_dict() for judged in self.endpoints]}

    def comparisons(self) -> dict[str, Comparison]:
        """{title of the endpoint: every pair, interval and test}, of the endpoints that could be compared."""
        return {judged.title: judged.comparison for judged in self.endpoints if judged.comparison is not None}


def analyse(
    study: Study,
    *,
    endpoints: Sequence[str] = (),
    baseline: str | None = None,
    runs: Sequence[StoredRun] | None = None,
    resamples: int = stats.RESAMPLES,
) -> Analysis:
    """What the runs of a study show.

    Args:
      study: a results folder.
      endpoints: metrics to judge by besides the primary endpoint, METRIC[:last|best|tail][:min|max][:log|linear].
      baseline: compare every other arm with this one instead of the planned pairs.
      runs: of the folder, when they have been read already.
      resamples: of each bootstrap.
    """
    every = study.runs() if runs is None else runs
    wanted, seeds = {arm.label for arm in study.record.arms}, set(study.record.seeds)
    own = [run for run in every if run.spec.optimizer in wanted and run.spec.seed in seeds]
    damage = list(study.damage)
    tuning_runs = study.tuning_runs() if study.record.tuning is not None else []
    tried = tuned.tried(study, tuning_runs)
    suspected = tuned.doubts(study, own)
    labels = [arm.label for arm in study.record.arms]
    if baseline is not None:
        check_known({label: {} for label in labels}, baseline, "baseline")
        pairs = [(label, baseline) for label in labels if label != baseline]
    else:
        pairs = planned.contrasts(study.record, labels)
    family = len(pairs)
    pairs = [pair for pair in pairs if suspected.allow(*pair)]
    judged = tuple(
        _judge_runs(measure, own, pairs, resamples, family) for measure in judged_by.measures(study, endpoints)
    )
    if tried and judged[0].comparison is not None:
        judged = (with_luck(judged[0], tried, study.record.chosen), *judged[1:])
    confidence = 0.95
    headline = tuple(f"{f.answer}: {f.sentence}" for f in judged[0].findings)
    return Analysis(
        testbed=study.record.testbed,
        confidence=confidence,
        seeds=tuple(study.record.seeds),
        rule=verdicts.rule(confidence, tuned=bool(tried)),
        fairness=(*tuned.fairness(study, tuning_runs, tried), *suspected.notes),
        headline=headline,
        arms=tuple(arms_of(study, own, judged[0].values, judged[0].maximize)),
        endpoints=judged,
        sensitivity=tuned.sensitivity(study, tried),
        notes=(*damage, *_lost(study, own)),
        tried=tried,
    )


def _lost(study: Study, runs: Sequence[StoredRun]) -> list[str]:
    """What is said of runs that are not in the folder."""
    gone = planned.lost(study.record, runs)
    count = sum(map(len, gone.values()))
    if not count:
        return []
    whose = "; ".join(f"{arm}: seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}" for arm, seeds in gone.items())
    are = "run is" if count == 1 else "runs are"
    return [f"{count} {are} not in the folder ({whose}); a study of all its optimizers and seeds makes what is missing"]


def with_luck(judged: Judged, tried: Mapping[str, Sequence[Tried]], chosen: Mapping[str, Mapping[str, Any]]) -> Judged:
    """The endpoint that was tuned for, judged with the luck of the tuning counted: see `confirming`."""
    if judged.comparison is None:
        return judged
    comparison = confirming.counted(judged.comparison, tried, chosen)
    findings = tuple(_finding(c, judged.log, judged.maximize) for c in comparison.contrasts)
    shares = only_shown(judged.attribution, verdicts_of(findings), all_judged=True)
    return dataclasses.replace(judged, comparison=comparison, findings=findings, attribution=shares)


def verdicts_of(findings: Sequence[Finding]) -> dict[tuple[str, str], str]:
    """{(treatment, baseline): verdict}."""
    return {(f.treatment, f.baseline): f.verdict for f in findings}


def _judge_runs(
    measure: Measure, runs: Sequence[StoredRun], pairs: Sequence[tuple[str, str]], resamples: int, family: int
) -> Judged:
    values = judged_by.values(runs, measure.endpoint, measure.reduction)
    judged_by.check_logged(measure, values, runs)
    return judge(measure, values, pairs, judged_by.without_value(measure, values, runs), resamples, family)


def judge(
    measure: Measure,
    values: Values,
    pairs: Sequence[tuple[str, str]],
    notes: Sequence[str] = (),
    resamples: int = stats.RESAMPLES,
    family: int | None = None,
) -> Judged:
    """Compare the pairs on one endpoint; `notes` come first among its notes.

    p-values are adjusted for `family` contrasts, by default for all `pairs`, also where an arm has no runs to compare:
    that an arm crashed makes no other contrast surer.
    """
    endpoint, notes = measure.endpoint, list(notes)
    log = endpoint.log and all_positive(values)
    if endpoint.log and not log:
        notes.append("values at or below 0 have no logarithm: compared as differences instead of ratios")
    possible: list[tuple[str, str]] = []
    missing: list[tuple[str, str]] = []
    for a, b in pairs:
        shared = a in values and b in values and not values[a].keys().isdisjoint(values[b])
        (possible if shared else missing).append((a, b))
    if missing:
        notes.append(f"no finished seed in common, so not compared: {listed([f'{a} vs {b}' for a, b in missing])}")
    comparison, findings = None, []
    if values and possible:
        comparison = stats.compare_pairs(
            values,
            possible,
            log=log,
            higher_is_better=endpoint.maximize,
            threshold=endpoint.threshold,
            resamples=resamples,
            family=len(pairs) if family is None else family,
        )
        findings = [_finding(c, log, endpoint.maximize) for c in comparison.contrasts]
        notes += all_notes(comparison)
    # arms that compare nothing have no pairs, and then there is nothing to take apart either
    shares = attribute(values, log=log, higher_is_better=endpoint.maximize) if pairs else ()
    return Judged(
        name=measure.name,
        title=endpoint.title,
        primary=measure.primary,
        declared=measure.declared,
        log=log,
        maximize=endpoint.maximize,
        threshold=endpoint.threshold,
        values=values,
        findings=tuple(findings),
        attribution=only_shown(shares, verdicts_of(findings)),
        missing=tuple(missing),
        notes=tuple(notes),
        comparison=comparison,
    )


def _finding(c: Contrast, log: bool, higher_is_better: bool) -> Finding:
    # The power of the t test says nothing where it does not decide alone.
    lucky = c.test == confirming.TEST
    can_show = None if lucky else power.detectable(c, log=log, higher_is_better=higher_is_better)
    found = verdicts.answer(c, can_show)
    effect = c.ratio if log else c.difference

    def ends(of: stats.Effect | None) -> tuple[float | None, float | None, float | None]:
        if of is None:
            return None, None, None
        return of.value, *((of.ci.low, of.ci.high) if of.ci else (None, None))

    percent, effects = ends(c.percent), ends(effect)
    return Finding(
        treatment=c.treatment,
        baseline=c.baseline,
        verdict=c.verdict,
        answer=found.short,
        sentence=found.sentence,
        percent=percent[0],
        percent_low=percent[1],
        percent_high=percent[2],
        effect=effects[0],
        effect_low=effects[1],
        effect_high=effects[2],
        test=c.test,
        p=c.p,
        p_holm=c.p_holm,
        family=c.family,
        n=c.n,
        wins=c.wins,
        ties=c.ties,
        losses=c.losses,
        diverged_treatment=c.diverged_treatment,
        diverged_baseline=c.diverged_baseline,
        detectable=can_show,
        notes=c.notes,
        contrast=c,
    )


def arms_of(study: Study, runs: Sequence[StoredRun], values: Values, higher_is_better: bool) -> list[ArmSummary]:
    """One row per arm, in the order of the study."""
    by_arm: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_arm.setdefault(run.spec.optimizer, []).append(run)
    first = study.record.arms[0].optimizer if study.record.arms else ""
    rows, gone = [], planned.lost(study.record, runs)
    for arm in study.record.arms:
        own = by_arm.get(arm.label, [])
        ends = [run.result.status if run.result else "unfinished" for run in own]
        ends += ["unfinished" for _ in gone.get(arm.label, ())]
        numbers = np.array(list(values.get(arm.label, {}).values()), float)
        ranked = np.where(np.isfinite(numbers), numbers, -np.inf if higher_is_better else np.inf)
        q1, median, q3 = (quantile(ranked, q) if len(ranked) else None for q in (0.25, 0.5, 0.75))
        finite = numbers[np.isfinite(numbers)]
        done = [run.result for run in own if run.result is not None and run.result.status == "ok"]
        paces = [pace for result in done if (pace := result.seconds_per_step) is not None]
        role = "treatment" if arm.optimizer == first else "control" if arm.optimizer in recipes.CONTROLS else "baseline"
        rows.append(
            ArmSummary(
                label=arm.label,
                optimizer=arm.optimizer,
                role=role,
                runs=len(ends),
                ok=ends.count("ok"),
                diverged=ends.count("diverged"),
                failed=ends.count("failed"),
                unfinished=ends.count("unfinished"),
                median=median,
                q1=q1,
                q3=q3,
                mean=float(sum(finite / len(finite))) if len(finite) else None,
                seconds=statistics.median(result.seconds for result in done) if done else None,
                seconds_per_step=statistics.median(paces) if paces else None,
                times=_times(done),
                chosen=study.record.chosen.get(arm.label, {}),
            )
        )
    return rows


def _times(results: Sequence[RunResult]) -> dict[str, float]:
    """Medians of what the runs spent their time on."""
    parts = [part for result in results for part in result.times if part != "per_step"]
    return {
        part: statistics.median(result.times[part] for result in results if part in result.times)
        for part in dict.fromkeys(parts)
    }


def as_json(
    study: Study, analysis: Analysis, runs: Sequence[StoredRun] | None = None, target: Target | None = None
) -> dict[str, Any]:
    """A study for machines: every run without its curve, the arms, the analysis and every comparison."""
    every = study.runs() if runs is None else runs
    return {
        "out": str(study.path),
        **json.loads(study.record.model_dump_json()),
        "runs": [_run(run) for run in every],
        "tuning_runs": [_tuning_run(study, run) for run in study.tuning_runs()],
        "summary": [{"optimizer": arm.label, **_but_label(plain(arm))} for arm in analysis.arms],
        "analysis": analysis.to_dict(),
        "comparisons": {title: comparison.to_dict() for title, comparison in analysis.comparisons().items()},
        "target": None if target is None else _target(study, every, target),
        "notes": [*analysis.notes, *(note for judged in analysis.endpoints for note in judged.notes)],
    }


def _tuning_run(study: Study, run: StoredRun) -> dict[str, Any]:
    values = study.record.tuning.values(run.spec) if study.record.tuning is not None else {}
    return {**_run(run), "values": values}


def _target(study: Study, runs: Sequence[StoredRun], target: Target) -> dict[str, Any]:
    found, races = tuned.to_target(study, runs, target)
    return {
        "target": str(target),
        "arms": plain([dataclasses.asdict(one) for one in found.values()]),
        "contrasts": plain([dataclasses.asdict(race) for race in races]),
    }


def _but_label(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("label", "optimizer")}


def _run(run: StoredRun) -> dict[str, Any]:
    ended = json.loads(run.result.model_dump_json(exclude={"curve"})) if run.result else {"status": "unfinished"}
    return {"id": run.id, "optimizer": run.spec.optimizer, "seed": run.spec.seed, **ended}
