"""Paired statistics on {optimizer: {seed: value}}, on scipy and statsmodels.

All tests are two-sided and paired by seed. With y = log10(value) (`log=True`) or y = value, the difference of a seed is

    d = y[baseline] - y[treatment]        d > 0: the treatment is better (lower)

and its mean is reported as the geometric-mean ratio baseline/treatment (log) or as the mean difference. Where higher
values are better, d changes sign and the ratio is treatment/baseline, so d > 0 and a ratio above 1 always speak for
the treatment.

NOTE: three rules hold everywhere, and every use of them is printed among the notes of a result.

* A value that is NaN or infinite is a diverged run. It is counted, ranks as the worst (medians, quartiles, IQM, wins,
  sign test, Wilcoxon, McNemar; two diverged runs of one seed tie), and has no place in means, t and bootstrap, which
  say how many pairs they left out. A verdict is then taken from the ranks.
* A seed that only one of two optimizers has cannot be paired: the contrast uses the seeds of both and lists the rest.
* What the data cannot support (one pair, differences without variance) is None, not a number.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from statsmodels.stats.contingency_tables import mcnemar as mcnemar_test
from statsmodels.stats.proportion import proportion_confint

if TYPE_CHECKING:
    pass

Seed = int | str
Values = Mapping[str, Mapping[Seed, float]]
Array = NDArray[np.float64]
Verdict = Literal["better", "worse", "unclear", "identical", "untested"]

EXACT_UP_TO = 500  # pairs; the exact distribution of the signed ranks takes O(n³), a fraction of a second at 500
RESAMPLES = 9_999


@dataclass(frozen=True)
class Interval:
    """A confidence interval and how it was made."""

    low: float
    high: float
    method: str

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Rate:
    """Successes out of n runs with the Clopper–Pearson interval."""

    successes: int
    n: int
    rate: float
    ci: Interval


@dataclass(frozen=True)
class Summary:
    """One optimizer over its seeds. `mean`, `sd` and `geometric_mean` are of the finite values; the rest ranks diverged
    runs as the worst."""

    optimizer: str
    n: int
    diverged: int
    mean: float | None
    sd: float | None
    geometric_mean: float | None
    median: float
    q1: float
    q3: float
    median_ci: Interval | None
    iqm: float
    iqm_ci: Interval | None
    success: Rate | None


@dataclass(frozen=True)
class Pair:
    """One seed's two values; `difference` is d, infinite when one of the runs diverged."""

    seed: Seed
    treatment: float
    baseline: float
    difference: float


@dataclass(frozen=True)
class Effect:
    """A size with its t interval and its BCa bootstrap interval."""

    value: float
    ci: Interval | None
    bootstrap_ci: Interval | None


@dataclass(frozen=True)
class PairedT:
    """t = mean(d) / (sd(d)/√n), d_z = t/√n, r = √(t²/(t² + df)), over the n pairs in which both runs are finite."""

    n: int
    left_out: int
    df: int
    t: float | None
    p: float | None
    d_z: float | None
    r: float | None
    p_holm: float | None = None


@dataclass(frozen=True)
class Wilcoxon:
    """Signed ranks over the pairs that differ. `rank_biserial` = (W⁺ - W⁻)/(W⁺ + W⁻), positive for the treatment."""

    n: int
    zeros: int
    statistic: float | None
    p: float | None
    rank_biserial: float | None
    method: str
    p_holm: float | None = None


@dataclass(frozen=True)
class SignTest:
    wins: int
    losses: int
    p: float | None
    p_holm: float | None = None


@dataclass(frozen=True)
class McNemar:
    """Success (the threshold is met) and failure in pairs; exact test on the pairs that disagree."""

    threshold: float
    both: int
    only_treatment: int
    only_baseline: int
    neither: int
    rate_difference: float
    p: float
    p_holm: float | None = None


@dataclass(frozen=True)
class Contrast:
    """Treatment against baseline, effect sizes first."""

    treatment: str
    baseline: str
    pairs: tuple[Pair, ...]
    wins: int
    ties: int
    losses: int
    diverged_treatment: int
    diverged_baseline: int
    improvement: float
    improvement_ci: Interval
    difference: Effect | None
    ratio: Effect | None
    median: float
    q1: float
    q3: float
    t: PairedT
    wilcoxon: Wilcoxon
    sign: SignTest
    mcnemar: McNemar | None
    notes: tuple[str, ...]
    confidence: float

    @property
    def n(self) -> int:
        return len(self.pairs)

    @property
    def verdict(self) -> Verdict:
        """What the data support about the treatment: by the interval of d, or by signed ranks if a run diverged."""
        if self.ties == self.n:
            return "identical" if self.t.n else "untested"
        if self.diverged_treatment or self.diverged_baseline:
            p, side = self.wilcoxon.p, self.wilcoxon.rank_biserial
            if p is None or side is None or self.n < 2:
                return "untested"
            return "unclear" if p >= 1 - self.confidence else ("better" if side > 0 else "worse")
        if self.difference is None or self.difference.ci is None:
            return "untested"
        if self.difference.ci.holds(0):
            return "unclear"
        return "better" if self.difference.value > 0 else "worse"


@dataclass(frozen=True)
class Comparison:
    """Every optimizer's summary and the contrasts, with Holm-adjusted p-values across the contrasts."""

    log: bool
    higher_is_better: bool
    confidence: float
    threshold: float | None
    seeds: tuple[Seed, ...]
    values: Values
    summaries: tuple[Summary, ...]
    contrasts: tuple[Contrast, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite become the strings "nan", "inf" and "-inf"."""
        out: dict[str, Any] = _plain(dataclasses.asdict(self))
        for entry, contrast in zip(out["contrasts"], self.contrasts, strict=True):
            entry["n"], entry["verdict"] = contrast.n, contrast.verdict
        return out


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def clopper_pearson(successes: float, n: int, confidence: float = 0.95) -> Interval:
    """Exact interval of a rate; half successes (ties) are let through to the same beta quantiles."""
    low, high = proportion_confint(successes, n, alpha=1 - confidence, method="beta")
    return Interval(float(low), float(high), "Clopper–Pearson")


def quantile(values: Array, q: float) -> float:
    """Linear-interpolation quantile that lets infinite entries stand at their end instead of giving NaN."""
    ordered = np.sort(values)
    at = q * (len(ordered) - 1)
    low, part = int(at), at - int(at)
    if part == 0 or ordered[low] == ordered[low + 1]:
        return float(ordered[low])
    ends = np.isinf(ordered[low : low + 2])
    if ends.any():
        return 0.0 if ends.all() else float(ordered[low + int(ends[1])])
    return float(ordered[low] + part * (ordered[low + 1] - ordered[low]))


def iqm(values: Array) -> float:
    """Interquartile mean: the mean without the lowest and highest ⌊n/4⌋ values."""
    return float(stats.trim_mean(values, 0.25))


def bootstrap_ci(
    values: Array, statistic: Callable[..., Any], confidence: float = 0.95, resamples: int = RESAMPLES
) -> Interval | None:
    """BCa bootstrap interval (seeded), a percentile one where BCa is undefined, None where resamples cannot differ."""
    if len(values) < 2 or not np.isfinite(values).all() or np.ptp(values) == 0:
        return None
    for method, name in (("BCa", "BCa bootstrap"), ("percentile", "percentile bootstrap")):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # scipy warns where the jackknife or the resamples are degenerate; the NaN that follows is handled here
            warnings.simplefilter("ignore")
            found = stats.bootstrap(
                (values,),
                statistic,
                confidence_level=confidence,
                n_resamples=resamples,
                method=method,
                vectorized=True,
                axis=-1,
                rng=np.random.default_rng(0),
            ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            return Interval(float(found.low), float(found.high), name)
    return None


def _trimmed(values: Any, axis: int = -1) -> Any:
    return stats.trim_mean(values, 0.25, axis=axis)


def summarise(
    optimizer: str,
    values: Sequence[float],
    *,
    log: bool = False,
    higher_is_better: bool = False,
    threshold: float | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Summary:
    """Medians, quartiles, IQM and rates of one optimizer."""
    x = np.asarray(values, float)
    finite = x[np.isfinite(x)]
    ranked = np.where(np.isfinite(x), x, -np.inf if higher_is_better else np.inf)
    success = None
    if threshold is not None:
        k = int(np.sum(_succeeds(x, threshold, higher_is_better)))
        success = Rate(k, len(x), k / len(x), clopper_pearson(k, len(x), confidence))
    return Summary(
        optimizer=optimizer,
        n=len(x),
        diverged=len(x) - len(finite),
        mean=float(finite.mean()) if len(finite) else None,
        sd=float(finite.std(ddof=1)) if len(finite) > 1 else None,
        geometric_mean=float(10 ** np.log10(finite).mean()) if log and len(finite) else None,
        median=quantile(ranked, 0.5),
        q1=quantile(ranked, 0.25),
        q3=quantile(ranked, 0.75),
        median_ci=bootstrap_ci(ranked, np.median, confidence, resamples),
        iqm=iqm(ranked),
        iqm_ci=bootstrap_ci(ranked, _trimmed, confidence, resamples),
        success=success,
    )


def paired_t(d: Array, rounding: Array, left_out: int = 0) -> PairedT:
    """Paired t on differences; without variance (beyond `rounding`, the error bound of each d) it has no value."""
    n = len(d)
    df = max(n - 1, 0)
    if n < 2 or np.ptp(d) <= 2 * rounding.max():
        return PairedT(n, left_out, df, None, None, None, None)
    result = stats.ttest_1samp(d, 0.0)
    t = float(result.statistic)
    # d_z = t/√n,  r = √(t²/(t² + df))
    return PairedT(n, left_out, df, t, float(result.pvalue), t / math.sqrt(n), math.sqrt(t**2 / (t**2 + df)))


def t_interval(d: Array, confidence: float = 0.95) -> Interval:
    """mean(d) ± t_{df}·sd(d)/√n."""
    half = float(stats.t.ppf((1 + confidence) / 2, len(d) - 1) * d.std(ddof=1) / math.sqrt(len(d)))
    return Interval(float(d.mean()) - half, float(d.mean()) + half, "t")


def _midranks(size: Array, rounding: Array) -> Array:
    """Ranks of |d|, shared where two sizes differ by no more than their rounding errors."""
    order = np.argsort(size, kind="stable")
    ordered, slack = size[order], rounding[order]
    with np.errstate(invalid="ignore"):  # inf - inf: two diverged runs, one rank
        opens = np.concatenate([[True], ordered[1:] - ordered[:-1] > slack[1:] + slack[:-1]])
    group = np.cumsum(opens) - 1
    position = np.arange(1, len(size) + 1, dtype=float)
    shared = np.bincount(group, weights=position) / np.bincount(group)
    ranks = np.empty(len(size))
    ranks[order] = shared[group]
    return ranks


def wilcoxon(d: Array, rounding: Array) -> Wilcoxon:
    """Wilcoxon signed-rank test, exact also with ties.

    Pairs with d = 0 are set aside. The distribution of W⁺ over all 2ⁿ signs is summed for the midranks at hand; without
    ties it is scipy's exact one, which knows no ties.
    """
    keep = d != 0
    zeros = int(np.sum(~keep))
    d, rounding = d[keep], rounding[keep]
    n = len(d)
    if n == 0:
        return Wilcoxon(0, zeros, None, None, None, "no pair differs")
    ranks = _midranks(np.abs(d), rounding)
    up, total = float(ranks[d > 0].sum()), float(ranks.sum())
    tied = len(np.unique(ranks)) < n
    if n > EXACT_UP_TO:
        p = float(stats.wilcoxon(np.sign(d) * ranks, method="asymptotic").pvalue)
        method = "normal approximation"
    else:
        # P(W⁺ = w) on doubled ranks, which are whole numbers: each rank joins W⁺ with probability ½
        chance = np.ones(1)
        for step in np.rint(2 * ranks).astype(int):
            chance = 0.5 * (np.pad(chance, (0, step)) + np.pad(chance, (step, 0)))
        at = round(2 * up)
        p = min(1.0, 2 * min(float(chance[: at + 1].sum()), float(chance[at:].sum())))
        method = "exact, tied ranks shared" if tied else "exact"
    return Wilcoxon(n, zeros, min(up, total - up), p, (2 * up - total) / total, method)


def sign_test(wins: int, losses: int) -> SignTest:
    """Binomial(wins + losses, ½), ties set aside."""
    p = float(stats.binomtest(wins, wins + losses).pvalue) if wins + losses else None
    return SignTest(wins, losses, p)


def _succeeds(values: Array, threshold: float, higher_is_better: bool) -> NDArray[np.bool_]:
    met = values >= threshold if higher_is_better else values <= threshold
    return np.asarray(met & np.isfinite(values))


def mcnemar(treatment: Array, baseline: Array, threshold: float, higher_is_better: bool = False) -> McNemar:
    """McNemar's exact test on who meets the threshold; a diverged run does not."""
    a = _succeeds(treatment, threshold, higher_is_better)
    b = _succeeds(baseline, threshold, higher_is_better)
    both, only_a, only_b, neither = (int(np.sum(cell)) for cell in (a & b, a & ~b, ~a & b, ~a & ~b))
    p = float(mcnemar_test([[both, only_a], [only_b, neither]], exact=True).pvalue)
    return McNemar(threshold, both, only_a, only_b, neither, float(a.mean() - b.mean()), min(1.0, p))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm-adjusted p-values: the k-th smallest of m becomes max over j ≤ k of (m - j + 1)·p₍ⱼ₎, at most 1.

    A planned contrast without a p-value still counts in m. (statsmodels' `multipletests` gives the same numbers but
    forces a full garbage collection on each call, which takes longer than all other statistics of a study.)
    """
    m, highest = len(p_values), 0.0
    adjusted: list[float | None] = [None] * m
    for k, (p, i) in enumerate(sorted((p, i) for i, p in enumerate(p_values) if p is not None)):
        highest = max(highest, min(1.0, (m - k) * p))
        adjusted[i] = highest
    return adjusted


def contrast(
    values: Values,
    treatment: str,
    baseline: str,
    *,
    log: bool = False,
    higher_is_better: bool = False,
    threshold: float | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Contrast:
    """Treatment against baseline over the seeds that both have."""
    _known(values, treatment, "treatment")
    _known(values, baseline, "baseline")
    common = [seed for seed in _in_order(values[baseline]) if seed in values[treatment]]
    if not common:
        raise ValueError(
            f"{treatment!r} and {baseline!r} have no seed in common, so nothing can be paired: "
            "run both with the same seeds"
        )
    if log:
        _check_positive(values, (treatment, baseline))
    x, y = (np.array([float(values[name][seed]) for seed in common]) for name in (treatment, baseline))
    notes = [
        f"{name} has no partner in {other} for seed{'s' if len(lone) > 1 else ''} {', '.join(map(str, lone))}: "
        "not part of this contrast"
        for name, other in ((treatment, baseline), (baseline, treatment))
        if (lone := [seed for seed in _in_order(values[name]) if seed not in values[other]])
    ]
    fine_x, fine_y = np.isfinite(x), np.isfinite(y)
    fine = fine_x & fine_y

    # d = y[baseline] - y[treatment], +inf where only the baseline diverged, -inf where only the treatment did
    with np.errstate(all="ignore"):
        u, v = (np.log10(x), np.log10(y)) if log else (x, y)
        d = np.where(x == y, 0.0, u - v if higher_is_better else v - u)
    d = np.where(fine, d, np.where(fine_x, np.inf, np.where(fine_y, -np.inf, 0.0)))
    size = np.maximum(np.abs(u), np.abs(v))
    rounding = 4 * np.finfo(float).eps * np.where(fine, np.maximum(size, 1.0) if log else size, 0.0)
    wins, losses = int(np.sum(d > 0)), int(np.sum(d < 0))
    ties = len(d) - wins - losses

    finite, left_out = d[fine], int(np.sum(~fine))
    t = paired_t(finite, rounding[fine], left_out)
    if left_out:
        notes.append(
            f"{left_out} of {len(d)} pairs hold a diverged run ({treatment}: {int(np.sum(~fine_x))}, {baseline}: "
            f"{int(np.sum(~fine_y))}): ranked as the worst, left out of mean, t and bootstrap"
        )
    if t.t is None:
        why = (
            "all runs diverged"
            if not len(finite)
            else "one finite pair"
            if len(finite) == 1
            else "the differences are all equal"
        )
        notes.append(f"{why}: t, its p-value, d_z, r and intervals are undefined")
    elif len(finite) < 5:
        notes.append(
            f"{len(finite)} finite pairs: no exact two-sided p-value can be below {2.0 ** (1 - len(finite)):.3g}"
        )

    difference = ratio = None
    if len(finite):
        ci = t_interval(finite, confidence) if t.t is not None else None
        boot = bootstrap_ci(finite, np.mean, confidence, resamples) if t.t is not None else None
        difference = Effect(float(finite.mean()), ci, boot)
        if log:
            ratio = Effect(antilog(difference.value), _power(ci), _power(boot))
    w = wilcoxon(d, rounding)
    if w.zeros:
        notes.append(f"{w.zeros} pair{'s are' if w.zeros > 1 else ' is'} equal: set aside by Wilcoxon and sign test")
    if "tied" in w.method:
        notes.append("some differences have the same size: Wilcoxon shares their ranks, still exact")
    with np.errstate(over="ignore"):
        spread = np.power(10.0, d) if log else d
    return Contrast(
        treatment=treatment,
        baseline=baseline,
        pairs=tuple(Pair(s, float(a), float(b), float(c)) for s, a, b, c in zip(common, x, y, d, strict=True)),
        wins=wins,
        ties=ties,
        losses=losses,
        diverged_treatment=int(np.sum(~fine_x)),
        diverged_baseline=int(np.sum(~fine_y)),
        improvement=(wins + 0.5 * ties) / len(d),
        improvement_ci=clopper_pearson(wins + 0.5 * ties, len(d), confidence),
        difference=difference,
        ratio=ratio,
        median=quantile(spread, 0.5),
        q1=quantile(spread, 0.25),
        q3=quantile(spread, 0.75),
        t=t,
        wilcoxon=w,
        sign=sign_test(wins, losses),
        mcnemar=None if threshold is None else mcnemar(x, y, threshold, higher_is_better),
        notes=tuple(notes),
        confidence=confidence,
    )


def _power(ci: Interval | None) -> Interval | None:
    return None if ci is None else Interval(antilog(ci.low), antilog(ci.high), ci.method)


def antilog(exponent: float) -> float:
    """10^exponent, infinite where that is beyond a double."""
    return float(10.0**exponent) if exponent < 308 else math.inf


def _in_order(seeds: Mapping[Seed, float]) -> list[Seed]:
    return sorted(seeds, key=lambda seed: (isinstance(seed, str), seed))


def _known(values: Values, name: str, role: str) -> None:
    if name not in values:
        near = difflib.get_close_matches(name, values, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"`{role}` must be one of {', '.join(map(repr, values))}; got {name!r}{hint}")


def _check_positive(values: Values, names: Sequence[str]) -> None:
    for name in names:
        for seed, value in values[name].items():
            if math.isfinite(value) and value <= 0:
                raise ValueError(
                    f"`log` needs values > 0; {name!r} has {value!r} for seed {seed!r}: leave out --log (log=False)"
                )


def compare_pairs(
    values: Values,
    pairs: Sequence[tuple[str, str]],
    *,
    log: bool = False,
    higher_is_better: bool = False,
    threshold: float | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Comparison:
    """The planned contrasts (treatment, baseline), Holm-adjusted across them.

    Args:
      values: optimizer → seed → final value; NaN or infinite for a diverged run.
      pairs: which treatment against which baseline.
      log: analyse log10 of the values and report geometric-mean ratios.
      higher_is_better: for accuracies and the like.
      threshold: a run that reaches it is a success; adds success rates and McNemar's test.
      confidence: level of all intervals.
      resamples: of each bootstrap.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0 and 1, for example 0.95; got {confidence!r}")
    empty = [name for name, seeds in values.items() if not seeds]
    if empty or not values:
        raise ValueError(f"`values` holds no value for {', '.join(map(repr, empty)) or 'any optimizer'}: leave it out")
    if log:
        _check_positive(values, list(values))
    summaries = tuple(
        summarise(
            name,
            [values[name][seed] for seed in _in_order(values[name])],
            log=log,
            higher_is_better=higher_is_better,
            threshold=threshold,
            confidence=confidence,
            resamples=resamples,
        )
        for name in values
    )
    found = [
        contrast(
            values,
            treatment,
            baseline,
            log=log,
            higher_is_better=higher_is_better,
            threshold=threshold,
            confidence=confidence,
            resamples=resamples,
        )
        for treatment, baseline in pairs
    ]
    by_t = holm([c.t.p for c in found])
    by_rank = holm([c.wilcoxon.p for c in found])
    by_sign = holm([c.sign.p for c in found])
    by_success = holm([c.mcnemar.p if c.mcnemar else None for c in found])
    contrasts = tuple(
        replace(
            c,
            t=replace(c.t, p_holm=by_t[i]),
            wilcoxon=replace(c.wilcoxon, p_holm=by_rank[i]),
            sign=replace(c.sign, p_holm=by_sign[i]),
            mcnemar=replace(c.mcnemar, p_holm=by_success[i]) if c.mcnemar else None,
        )
        for i, c in enumerate(found)
    )
    return Comparison(
        log=log,
        higher_is_better=higher_is_better,
        confidence=confidence,
        threshold=threshold,
        seeds=tuple(_in_order({seed: 0.0 for seeds in values.values() for seed in seeds})),
        values={name: dict(seeds) for name, seeds in values.items()},
        summaries=summaries,
        contrasts=contrasts,
        notes=tuple(
            f"{s.optimizer}: {s.diverged} of {s.n} runs diverged; its mean and sd are of the others"
            for s in summaries
            if s.diverged
        ),
    )


def compare(
    values: Values,
    *,
    baseline: str,
    log: bool = False,
    higher_is_better: bool = False,
    threshold: float | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Every other optimizer against `baseline`; arguments as in `compare_pairs`.

    Example:
      >>> adam, kbeta = {0: 4.0, 1: 2.0, 2: 8.0}, {0: 2.0, 1: 1.5, 2: 4.0}
      >>> found = compare({"adam": adam, "kbeta": kbeta}, baseline="adam", log=True).contrasts[0]
      >>> round(found.ratio.value, 3), found.wins, found.verdict
      (1.747, 3, 'unclear')
    """
    _known(values, baseline, "baseline")
    others = [name for name in values if name != baseline]
    if not others:
        raise ValueError(f"`values` holds only {baseline!r}: add the runs of another optimizer to compare with it")
    return compare_pairs(
        values,
        [(name, baseline) for name in others],
        log=log,
        higher_is_better=higher_is_better,
        threshold=threshold,
        confidence=confidence,
        resamples=resamples,
    )
