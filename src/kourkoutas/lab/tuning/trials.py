"""What a tuning tried, and which value is best.

An arm's choice is the value with the fewest runs that diverged, and of those the best mean score over the tuning seeds,
geometric where the endpoint is compared as ratios. A value with a run that failed cannot be chosen: nobody knows what
that run would have given.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kourkoutas.lab.errors import argument
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun
from kourkoutas.lab.specs.spec import SearchSpace, Value

Values = Mapping[str, Value]
Score = Callable[[StoredRun], float]
"""What a run that has ended counts for; NaN where it diverged or failed."""


@dataclass(frozen=True)
class Tried:
    """One set of values of one arm and what its tuning runs gave.

    Attributes:
      values: {axis: value}.
      scores: the endpoint of each tuning seed, in order; NaN for a run that diverged or failed.
      missing: tuning seeds whose runs have not ended or are lost, and have no score.
      failed: tuning seeds whose runs failed; 0 where failures count as divergence does.
    """

    values: Values
    scores: tuple[float, ...]
    missing: int = 0
    failed: int = 0

    @property
    def finite(self) -> list[float]:
        return [x for x in self.scores if math.isfinite(x)]

    @property
    def has_logarithms(self) -> bool:
        """Whether no score is at or below 0."""
        return all(x > 0 for x in self.finite)

    def standing(self, maximize: bool, log: bool = False) -> tuple[int, float]:
        """(runs without a score, mean of the others with the sign that makes less better): less is better.

        NOTE: the mean is that of the comparison on the test seeds, geometric where `log`. Seeds that are hard for every
        value move all means alike, and so do not blur the choice as they would blur one by medians.
        """
        fine = self.finite
        if not fine:
            return len(self.scores), math.inf
        mean = 10 ** (sum(map(math.log10, fine)) / len(fine)) if log else sum(x / len(fine) for x in fine)
        return len(self.scores) - len(fine), -mean if maximize else mean

    def loss(self, maximize: bool, log: bool = False) -> float:
        """The mean with the sign that makes less better; infinite when a run diverged or failed."""
        lost, mean = self.standing(maximize, log)
        return math.inf if lost else mean


def of_all_arms(tried: Mapping[str, Sequence[Tried]]) -> list[Tried]:
    """What all arms tried, one arm after the other."""
    return list(itertools.chain.from_iterable(tried.values()))


def as_ratios(tried: Iterable[Tried], log: bool) -> bool:
    """Whether scores are compared as ratios: one at or below 0 has no logarithm, and makes all of them differences."""
    return log and all(one.has_logarithms for one in tried)


def best(tried: Sequence[Tried], maximize: bool = False, log: bool = False) -> Tried:
    """Of the values without a failed run the one with the fewest diverged, and of those the best mean; of equal ones
    that with the smallest values.

    >>> best([Tried({"lr": 0.1}, (3.0, math.nan, math.nan)), Tried({"lr": 0.2}, (9.0, 7.0, math.nan))]).values
    {'lr': 0.2}
    """
    known = [one for one in tried if not one.failed]
    if not known:
        raise ValueError("every value that was tried has a failed run, so nothing can be chosen")
    ratios = as_ratios(tried, log)
    return min(known, key=lambda one: (*one.standing(maximize, ratios), *one.values.values()))


def choose(tried: Mapping[str, Sequence[Tried]], maximize: bool = False, log: bool = False) -> dict[str, Tried]:
    """{arm: its best}, all by the same kind of mean."""
    ratios = as_ratios(of_all_arms(tried), log)
    return {arm: best(own, maximize, ratios) for arm, own in tried.items()}


def of_study(snapshot: Snapshot, score: Score) -> dict[str, list[Tried]]:
    """{arm: what its tuning runs gave}, by rising values; a study that was not tuned has none."""
    record = snapshot.record
    if record.tuning is None:
        return {}
    return of_runs(record.tuning, snapshot.tuning_runs, score, count_failed=record.count_failed)


def of_runs(
    space: SearchSpace, runs: Iterable[StoredRun], score: Score, *, count_failed: bool
) -> dict[str, list[Tried]]:
    """{arm: what its tuning runs gave}, by rising values.

    A value whose runs have not all ended has the scores of those that have, and says how many are missing.
    """
    by_arm: dict[str, dict[tuple[tuple[str, Value], ...], dict[int, StoredRun]]] = {}
    for run in runs:
        values = tuple(space.values(run.spec).items())
        ended = by_arm.setdefault(run.spec.optimizer, {}).setdefault(values, {})
        if run.result is not None:
            ended[run.spec.seed] = run
    found: dict[str, list[Tried]] = {}
    for arm, by_value in by_arm.items():
        found[arm] = []
        for values, ended in sorted(by_value.items()):
            known = [ended[seed] for seed in space.seeds if seed in ended]
            failed = sum(run.result is not None and run.result.status == "failed" for run in known)
            found[arm].append(
                Tried(
                    values=dict(values),
                    scores=tuple(score(run) for run in known),
                    missing=len(space.seeds) - len(known),
                    failed=0 if count_failed else failed,
                )
            )
    return found


def edge(space: SearchSpace, tried: Sequence[Tried], chosen: Values) -> str | None:
    """ "lowest" or "highest" when the chosen value of a one-option tuning is the outermost one tried, else None."""
    if len(space.axes) > 1:
        return None
    name = space.axes[0].name
    values = [one.values[name] for one in tried]
    return None if not values else {min(values): "lowest", max(values): "highest"}.get(chosen[name])


def told(snapshot: Snapshot, found: Mapping[str, Sequence[Tried]]) -> list[str]:
    """How the arms were tuned, where a choice is at the edge, and which tuning runs are missing or failed."""
    record = snapshot.record
    space = record.tuning
    if space is None:
        return []
    ranges = ", ".join(f"{axis.name} in {axis.low:g} to {axis.high:g}" for axis in space.axes)
    most = max((len(own) for own in found.values()), default=0)
    wider = f", {most} after widening the range" if most > space.trials else ""
    lines = [f"Tuned alike on {len(space.seeds)} other seeds: {ranges}, {space.trials} trials each{wider}."]
    edges = []
    for arm, values in record.chosen.items():
        side = edge(space, found.get(arm, ()), values)
        if side is not None:
            name, value = next(iter(values.items()))
            edges.append(f"{name_of(arm)} ({side} {name} tried, {value:g})")
    if edges:
        lines.append(
            f"May do better beyond: {', '.join(edges)}. Widen {argument('tune')} or raise {argument('tune_budget')}."
        )
    missing = sum(one.missing for one in of_all_arms(found))
    if missing and record.chosen:
        lines.append(
            f"{missing} tuning run{' is' if missing == 1 else 's are'} missing. Without them nobody knows what an "
            "optimizer may have lost by its tuning, so no difference from it is clear. The study's command makes them."
        )
    failed = sum(run.result is not None and run.result.status == "failed" for run in snapshot.tuning_runs)
    if failed:
        what = "they rank as the worst" if record.count_failed else "no value with a failed run can be chosen"
        lines.append(
            f"{failed} of {len(snapshot.tuning_runs)} tuning runs failed: {what}. "
            f"{argument('retry_failed')} repeats them."
        )
    return lines
