"""How the arms of a study came by their learning rates, and what their tuning shows beyond the choice: how much an
optimizer depends on the value of an option, mostly its learning rate.

For the values v that were tried, with ℓ(v) the mean endpoint over the tuning seeds (geometric where the endpoint is
compared as ratios), ℓ₀ the worst finite mean that any arm gave, and ℓ* = min ℓ(v):

    range within 5 %   the widest run of neighbouring values around the best with ℓ(v) ≤ ℓ* + 5 %·|ℓ*|, as a ratio
    sensitivity        E_v[min(ℓ(v), ℓ₀) - ℓ*]         the learning-rate sensitivity of Wortsman et al. (2023)

NOTE: Wortsman et al. take ℓ₀ as the loss at initialisation, so that a diverged run counts as one that learned nothing.
The laboratory does not know it, so ℓ₀ is one number for all arms. The expectation is over the values tried, evenly
spaced in ratio for a tuning on a log scale; compare only arms that tried the same values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kourkoutas.lab.judging import endpoints
from kourkoutas.lab.judging.endpoints import Measure
from kourkoutas.lab.judging.luck import Lost, lost_by_tuning
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.planning.search import Tried, as_ratios, edge
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StudyRecord
from kourkoutas.lab.specs.search_space import Value
from kourkoutas.lab.specs.spec import Endpoint

SHORT = 2000  # steps below which the hidden warmup of K-β's default takes much of a run

MARGIN = 0.05  # the part of the best mean by which another may be worse and still count as about as good

AllTried = Mapping[str, Sequence[Tried]]


@dataclass(frozen=True)
class Point:
    """One value: the mean and the range of the endpoint over the tuning seeds; infinite where the run diverged.

    With `maximize`, minus infinity stands for a diverged run.
    """

    value: Value
    mean: float
    low: float
    high: float
    runs: int
    diverged: int


@dataclass(frozen=True)
class Sensitivity:
    """One arm's dependence on one option.

    Attributes:
      points: by rising value.
      best: the value with the best mean.
      low, high: the ends of the values around `best` whose means are within `margin` of the best one.
      ratio: high/low, 1 when no neighbour of the best is within the margin; None where low is not positive.
      open_below, open_above: that range ends because the values tried end there.
      sensitivity: mean over the values of what is lost against the best one; None when every run diverged.
    """

    arm: str
    option: str
    points: tuple[Point, ...]
    best: Value
    margin: float
    low: Value
    high: Value
    ratio: float | None
    open_below: bool
    open_above: bool
    sensitivity: float | None


def tried(snapshot: Snapshot, measure: Measure | None = None) -> dict[str, list[Tried]]:
    """{arm: what its tuning runs gave}, by rising values; a study that was not tuned has none.

    A value whose runs have not all ended has the scores of those that have, and says how many are missing. Scores are
    by the primary endpoint, unless another measure is given.
    """
    record = snapshot.record
    question = record.tuning
    if question is None:
        return {}
    measure = measure or endpoints.measures(record)[0]
    ended: dict[str, dict[tuple[tuple[str, Value], ...], dict[int, StoredRun]]] = {}
    for run in snapshot.tuning_runs:
        values = tuple(question.values(run.spec).items())
        runs = ended.setdefault(run.spec.optimizer, {}).setdefault(values, {})
        if run.result is not None:
            runs[run.spec.seed] = run
    found: dict[str, list[Tried]] = {}
    for arm, by_value in ended.items():
        found[arm] = []
        for values, runs in sorted(by_value.items()):
            known = [runs[seed] for seed in question.seeds if seed in runs]
            one = of_runs(dict(values), known, measure, count_failed=record.count_failed)
            found[arm].append(replace(one, missing=len(question.seeds) - len(known)))
    return found


def of_runs(values: Mapping[str, Value], runs: Sequence[StoredRun], measure: Measure, *, count_failed: bool) -> Tried:
    """What the tuning runs of one set of values gave."""
    scores = tuple(endpoints.score(run, measure.endpoint, measure.reduction) for run in runs)
    failed = sum(run.result is not None and run.result.status == "failed" for run in runs)
    return Tried(values, scores, failed=0 if count_failed else failed)


def lost(record: StudyRecord, found: AllTried, endpoint: Endpoint) -> dict[str, Lost | None]:
    """{arm: what its tuning may have lost on an endpoint}, None where a tuning run is missing; empty without a tuning.

    Args:
      found: what was tried, with the scores of the endpoint.
      endpoint: its `log` says on which scale the arms are compared, so that both have one unit.
    """
    if record.tuning is None:
        return {}
    luck = dict[str, Lost | None]()
    for arm, chosen in record.chosen.items():
        own = found.get(arm, ())
        at = next((k for k, one in enumerate(own) if dict(one.values) == dict(chosen)), None)
        if at is None or any(one.missing for one in own):
            luck[arm] = None
        else:
            luck[arm] = lost_by_tuning([[endpoints.as_loss(x, endpoint) for x in one.scores] for one in own], at)
    return luck


def sensitivity(record: StudyRecord, found: AllTried) -> tuple[Sensitivity, ...]:
    """How much each arm depends on the tuned option, of a study that tuned one."""
    question = record.tuning
    if question is None or len(question.axes) > 1:
        return ()
    primary = endpoints.declared(record)[0]
    ended = {arm: [one for one in own if one.scores] for arm, own in found.items()}
    option = question.axes[0].name
    return tuple(sensitivities(ended, option, maximize=primary.maximize, log=primary.log).values())


def sensitivities(tried: AllTried, option: str, *, maximize: bool = False, log: bool = False) -> dict[str, Sensitivity]:
    """{arm: its sensitivity to `option`}, of arms that tuned that option alone."""
    rising = {
        arm: sorted((one for one in own if set(one.values) == {option}), key=lambda one: one.values[option])
        for arm, own in tried.items()
    }
    log = as_ratios(itertools.chain.from_iterable(tried.values()), log)
    losses = {arm: [one.loss(maximize, log) for one in own] for arm, own in rising.items() if own}
    worst = max((loss for own in losses.values() for loss in own if math.isfinite(loss)), default=math.nan)
    return {arm: _of(arm, option, rising[arm], own, worst, maximize) for arm, own in losses.items()}


def _of(
    arm: str, option: str, tried: Sequence[Tried], losses: Sequence[float], worst: float, maximize: bool
) -> Sensitivity:
    values = [one.values[option] for one in tried]
    at = min(range(len(values)), key=losses.__getitem__)
    best = losses[at]
    allowed = best + MARGIN * abs(best) if math.isfinite(best) else -math.inf
    first = last = at
    while first > 0 and losses[first - 1] <= allowed:
        first -= 1
    while last < len(values) - 1 and losses[last + 1] <= allowed:
        last += 1
    # E_v[min(ℓ(v), ℓ₀) - ℓ*]
    lost = [min(loss, worst) - best for loss in losses] if math.isfinite(best) else []
    return Sensitivity(
        arm=arm,
        option=option,
        points=tuple(_point(one, v, loss, maximize) for one, v, loss in zip(tried, values, losses, strict=True)),
        best=values[at],
        margin=MARGIN,
        low=values[first],
        high=values[last],
        ratio=values[last] / values[first] if values[first] > 0 else None,
        open_below=first == 0,
        open_above=last == len(values) - 1,
        sensitivity=sum(lost) / len(lost) if lost else None,
    )


def _point(tried: Tried, value: Value, loss: float, maximize: bool) -> Point:
    worst = -math.inf if maximize else math.inf
    ranked = [score if math.isfinite(score) else worst for score in tried.scores]
    return Point(value, -loss if maximize else loss, min(ranked), max(ranked), len(ranked), ranked.count(worst))


def fairness(snapshot: Snapshot, found: AllTried) -> list[str]:
    """How the arms came by their learning rates, for the head of every account of a study."""
    record = snapshot.record
    if record.tuning is None:
        rates = _rates(snapshot)
        low, high = (_power(min(rates) / 10), _power(max(rates) * 10)) if rates else ("LOW", "HIGH")
        same = "One learning rate for all" if len(rates) < 2 else "Learning rates that nobody tuned"
        return [f"{same}: add --tune lr={low}:{high} for a fair answer.", *short_runs(snapshot)]
    question = record.tuning
    ranges = ", ".join(f"{axis.name} in {axis.low:g} to {axis.high:g}" for axis in question.axes)
    most = max((len(own) for own in found.values()), default=0)
    wider = f", {most} after widening the range" if most > question.trials else ""
    lines = [f"Tuned alike on {len(question.seeds)} other seeds: {ranges}, {question.trials} trials each{wider}."]
    edges = []
    for arm, values in record.chosen.items():
        side = edge(question, found.get(arm, ()), values)
        if side is not None:
            name, value = next(iter(values.items()))
            edges.append(f"{name_of(arm)} ({side} {name} tried, {value:g})")
    if edges:
        lines.append(f"May do better beyond: {', '.join(edges)}. Widen --tune or raise --tune-budget.")
    missing = sum(one.missing for own in found.values() for one in own)
    if missing and record.chosen:
        lines.append(
            f"{missing} tuning run{' is' if missing == 1 else 's are'} missing. Without them nobody knows what an "
            "optimizer may have lost by its tuning, so no difference from it is clear. The study's command makes them."
        )
    failed = sum(run.result is not None and run.result.status == "failed" for run in snapshot.tuning_runs)
    if failed:
        what = "they rank as the worst" if record.count_failed else "no value with a failed run can be chosen"
        lines.append(
            f"{failed} of {len(snapshot.tuning_runs)} tuning runs failed: {what}. --retry-failed repeats them."
        )
    return [*lines, *short_runs(snapshot)]


def _rates(snapshot: Snapshot) -> list[float]:
    """The positive learning rates that the runs were made with."""
    record = snapshot.record
    given = [record.settings.get("lr"), *(arm.settings.get("lr") for arm in record.arms)]
    used = [run.result.settings.get("lr") for run in snapshot.runs if run.result is not None]
    return sorted({float(rate) for rate in (*given, *used) if isinstance(rate, int | float) and rate > 0})


def _power(value: float) -> str:
    """
    >>> _power(0.001), _power(0.2), _power(30.0)
    ('1e-3', '2e-1', '3e1')
    """
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def short_runs(snapshot: Snapshot) -> list[str]:
    """A warning where K-β's default bias correction has had too few steps to let go of the learning rate.

    At the first step v = (1 - β2)·g² with β2 the mean of its range, and v̂ = v/(1 - β2_max), so that the step is

        |Δ|/lr = sqrt((1 - β2_max)/(1 - (β2_min + β2_max)/2))        13 % for 0.88 and 0.999
    """
    for run in snapshot.runs:
        if run.result is None or run.result.status != "ok":
            continue
        options = run.result.settings.get("optimizer")
        steps = max(run.result.curve.get("step", ()), default=0.0)
        if not isinstance(options, Mapping) or options.get("bias_correction") != "beta2max" or not 0 < steps < SHORT:
            continue
        low, high = options.get("beta2_min", 0.88), options.get("beta2_max", 0.999)
        if low < high:
            part = math.sqrt((1 - high) / (1 - (low + high) / 2))
            return [
                f"Short runs ({steps:.0f} steps): K-β's default starts at {100 * part:.0f} % of the learning rate. "
                'Try bias_correction="exact" (kbeta-exact).'
            ]
    return []
