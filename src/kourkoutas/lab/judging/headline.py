"""The answer of a study in sentences, by the one rule: the primary endpoint decides, and the headline hides nothing.

NOTE: what is not clear is never called equal, and an unfinished study has no verdict: a look at a study that is still
growing is one more chance of a false answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.statistics import between
from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.planning.contrasts import LEVEL, Family

MOST_TREATMENTS = 2  # with more, as in a grid, the headline counts
MOST_SECONDARY = 3
MOST_SEEDS = 3  # named in a sentence
MOST_NAMES = 4  # of optimizers in a sentence; the plot below it names the others
NOTHING = "There is nothing to compare: no two optimizers have a finished seed in common."

RULE = (
    "The primary endpoint decides. A difference is clear where the two-sided p of the paired t test over the seeds, or "
    "of Wilcoxon's signed ranks where a run diverged, is below {level:.2g} after Holm's adjustment for {family}"
    "{counted}. {intervals}{margin}"
)
COUNTED = ", with what an optimizer may have lost by the luck of its tuning counted"


def rule(family: Family, *, tuned: bool, margin: float | None = None) -> str:
    """The one rule that a headline follows."""
    return RULE.format(
        level=LEVEL,
        family=family.words(),
        counted=COUNTED if tuned else "",
        intervals=intervals_words(family.size),
        margin="" if margin is None else f" Equal within {margin:g} %: the interval lies inside ±{margin:g} %.",
    )


def intervals_words(family: int) -> str:
    """How sure the intervals are.

    >>> intervals_words(1)
    'Intervals are at 95 %.'
    """
    if family <= 1:
        return "Intervals are at 95 %."
    each = 100 * Family(family).confidence
    return f"Intervals hold together at 95 %, each of {family} at {each:.4g} %; Holm's p may be clear before they are."


def headline(endpoints: Sequence[Comparison]) -> str:
    """The answer: what the primary endpoint says, and what the declared secondary ones say against or beside it."""
    first = endpoints[0]
    if not first.contrasts:
        return NOTHING
    by_treatment: dict[str, list[Contrast]] = {}
    for c in first.contrasts:
        by_treatment.setdefault(c.treatment, []).append(c)
    if len(by_treatment) > MOST_TREATMENTS:
        return _counts(first.contrasts)
    lines = [_about(treatment, own, first.margin) for treatment, own in by_treatment.items()]
    lines += _lacking(first.missing)
    lines += _secondary(first, endpoints[1:])
    return " ".join(lines)


def _about(treatment: str, contrasts: Sequence[Contrast], margin: float | None) -> str:
    who, groups = name_of(treatment), dict[str, list[Contrast]]()
    for c in contrasts:
        groups.setdefault(c.verdict, []).append(c)
    lines = []
    if clear := [*groups.get("better", ()), *groups.get("worse", ())]:
        lines.append(f"{who} is {_sizes(clear, margin)} on the deciding endpoint.")
    if equal := groups.get("equal"):
        lines.append(f"{who} is equal to {_named(equal)} within {margin:g} %.")
    if unclear := groups.get("unclear"):
        lines.append(_unclear(who, unclear, len(contrasts)))
    if same := groups.get("identical"):
        lines.append(f"{who} ends exactly like {_named(same)}.")
    if untested := groups.get("untested"):
        why = listed(list(dict.fromkeys(c.why for c in untested)))
        lines.append(f"{who} cannot be compared with {_named(untested)}: {why}.")
    if unfinished := groups.get("unfinished"):
        lines.append(f"No verdict yet on {who} against {_named(unfinished)}: runs failed.")
    return " ".join([*lines, *(line for c in contrasts if (line := carried_words(c)))])


def _named(contrasts: Sequence[Contrast]) -> str:
    """The baselines; of many how many."""
    if len(contrasts) > MOST_NAMES:
        return f"{len(contrasts)} optimizers"
    return listed([name_of(c.baseline) for c in contrasts])


def _sizes(clear: Sequence[Contrast], margin: float | None) -> str:
    """How far ahead or behind; of many on which side of how many."""
    sides = []
    for verdict, side in (("better", "ahead of"), ("worse", "behind")):
        own = [c for c in clear if c.verdict == verdict]
        if len(own) > MOST_NAMES:
            sides.append(f"{side} {len(own)} optimizers")
        elif own:
            sides.append(f"{side} {listed([size(c, margin).removeprefix(f'{side} ') for c in own])}")
    return " and ".join(sides)


def _unclear(who: str, unclear: Sequence[Contrast], contrasts: int) -> str:
    if len(unclear) == contrasts > 1 and not any(c.lost for c in unclear):
        return "No clear winner on the deciding endpoint."
    if len(unclear) == 1:
        return f"No clear difference between {who} and {_with_lost(unclear[0])}."
    if len(unclear) > MOST_NAMES:
        return f"{who} is not clearly different from {_named(unclear)}."
    named = ", nor from ".join(_with_lost(c) for c in unclear)
    return f"{who} is not clearly different from {named}."


def carried_words(c: Contrast) -> str:
    """The seeds without which the verdict would be another; of many how many."""
    by_verdict: dict[str, list[Seed]] = {}
    for seed, verdict in c.carried_by:
        by_verdict.setdefault(verdict, []).append(seed)
    who, other = name_of(c.treatment), name_of(c.baseline)
    would = {
        "better": f"{who} would be clearly ahead of {other}",
        "worse": f"{who} would be clearly behind {other}",
        "equal": f"{who} and {other} would be equal within the margin",
        "unclear": f"{who} and {other} would not clearly differ",
    }
    parts = []
    for changed, seeds in by_verdict.items():
        if len(seeds) == 1:
            without = f"without seed {seeds[0]}"
        elif len(seeds) <= MOST_SEEDS:
            without = f"without one of seeds {', '.join(map(str, seeds))}"
        else:
            without = f"without any one of {len(seeds)} of the {c.n} seeds"
        parts.append(f"{without}, {would[changed]}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _lacking(missing: Sequence[tuple[str, str]]) -> list[str]:
    names = list(dict.fromkeys(name_of(b) for _, b in missing))
    return [f"{listed(names)} {'has' if len(names) == 1 else 'have'} no finished seed to compare."] if names else []


def _secondary(first: Comparison, others: Sequence[Comparison]) -> list[str]:
    """Where the primary endpoint shows nothing, or the opposite: what the declared others clearly show."""
    deciding = {(c.treatment, c.baseline): c.verdict for c in first.contrasts}
    lines = []
    for endpoint in others:
        clear: dict[str, list[Contrast]] = {}
        for c in endpoint.contrasts if endpoint.declared else ():
            decided = deciding.get((c.treatment, c.baseline))
            if c.verdict in ("better", "worse") and c.verdict != decided and decided is not None:
                clear.setdefault(c.treatment, []).append(c)
        for treatment, own in clear.items():
            alike = len({won(c) for c in own}) == 1
            sizes = listed([size(c) if alike else f"{size(c)} {won(c)}" for c in own])
            on = f"On {endpoint.title} (secondary)"
            lines.append(f"{on} {name_of(treatment)} is {sizes}{f', {won(own[0])}' if alike else ''}.")
    rest = len(lines) - MOST_SECONDARY
    return [*lines[:MOST_SECONDARY], f"{rest} more secondary results are clear."] if rest > 0 else lines


def ratio(percent: float, higher_is_better: bool) -> float:
    """treatment/baseline of so many percent better."""
    return 1 + percent / 100 if higher_is_better else 1 - percent / 100


def percent_text(percent: float, higher_is_better: bool) -> str:
    """What the treatment's value is beside the baseline's; beyond a factor of 2 as one.

    >>> percent_text(-743.2, False), percent_text(3.14, False), percent_text(-25, False), percent_text(88.1, False)
    ('8.4× higher', '3.1 % lower', '25 % higher', '8.4× lower')
    """
    times = ratio(percent, higher_is_better)
    if times >= 2:
        return f"{digits(times)}× higher"
    if 0 < times <= 0.5:
        return f"{digits(1 / times)}× lower"
    side = "" if times == 1 else " higher" if times > 1 else " lower"
    return f"{digits(percent)} %{side}"


def times_between(low: float, high: float, higher_is_better: bool) -> str:
    """An interval of percentages as factors, in the direction of the larger one.

    >>> times_between(-800, -650, False), times_between(80, 90, False)
    ('7.5×, 9.0×', '5.0×, 10×')
    """
    ends = [ratio(x, higher_is_better) for x in (low, high)]
    if sum(ends) < 2:
        ends = [1 / x if x > 0 else math.inf for x in ends]
    return between(min(ends), max(ends), lambda x: f"{digits(x)}×")


def digits(value: float) -> str:
    """Two digits of a small number, all before the point of a large one, without its sign.

    >>> [digits(x) for x in (0.8123, 9.0, 41.4, -312.2, 0.0, 2.61e6, 2e-4)]
    ['0.81', '9.0', '41', '312', '0', '2.6e6', '2e-4']
    """
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        number, _, power = f"{size:.1e}".partition("e")
        return f"{float(number):g}e{int(power)}" if math.isfinite(size) else f"{size}"
    return f"{size:.0f}" if size >= 9.95 or size == 0 else f"{size:#.2g}"


def size(c: Contrast, margin: float | None = None) -> str:
    """Who is ahead of whom, and by how much: "behind Adam 0.999 (3.1 % higher)".

    How many runs were lost stands in the table of optimizers.
    """
    ahead = c.verdict == "better" if c.verdict in ("better", "worse") else c.side > 0
    of = f"{'ahead of' if ahead else 'behind'} {name_of(c.baseline)}"
    percent = c.percent.value if c.percent is not None else None
    facts = []
    if percent is not None and math.isfinite(percent) and (percent > 0) == ahead:
        facts.append(percent_text(percent, c.higher_is_better))
    if c.small and margin is not None:
        facts.append(f"clear, and smaller than {margin:g} %")
    facts += lost_ways(c)
    return f"{of} ({'; '.join(facts)})" if facts else of


def won(c: Contrast) -> str:
    """On how many seeds the side that is ahead won."""
    count = c.wins if c.verdict == "better" else c.losses
    return f"on all {c.n} seeds" if count == c.n else f"on {count} of {c.n} seeds"


def lost_words(c: Contrast) -> str:
    """How many runs of whom diverged, or never got there, or failed."""
    counts = (
        (c.baseline, c.diverged.baseline, c.absent),
        (c.baseline, c.failed.baseline, "failed"),
        (c.treatment, c.diverged.treatment, c.absent),
        (c.treatment, c.failed.treatment, "failed"),
    )
    return ", ".join(f"{count} of {c.n} of {name_of(arm)} {how}" for arm, count, how in counts if count)


def lost_ways(c: Contrast) -> list[str]:
    """That runs were lost, and how, without their numbers."""
    return [f"runs {how}" for counts, how in ((c.diverged, c.absent), (c.failed, "failed")) if any(counts)]


def _with_lost(c: Contrast) -> str:
    lost = "; ".join(lost_ways(c))
    return f"{name_of(c.baseline)} ({lost})" if lost else name_of(c.baseline)


def _counts(contrasts: Sequence[Contrast]) -> str:
    words = {
        "better": "the first named is ahead",
        "worse": "it is behind",
        "equal": "they are equal within the margin",
        "unclear": "there is no clear difference",
        "identical": "both end alike",
        "untested": "nothing can be said",
        "unfinished": "a run failed",
    }
    counts = [f"in {k} {text}" for v, text in words.items() if (k := sum(c.verdict == v for c in contrasts))]
    return f"Of {len(contrasts)} comparisons, {listed(counts)}."


def answer(c: Contrast, margin: float | None = None) -> str:
    """One contrast in full: what is clear, with the numbers that decide."""
    who, other = name_of(c.treatment), name_of(c.baseline)
    record = f"better on {c.wins} of {c.n} seeds" + (f", equal on {c.ties}" if c.ties else "")
    if c.verdict == "identical":
        return f"{who} and {other} end with the same value on all {c.n} seeds."
    if c.verdict in ("untested", "unfinished"):
        none = "no verdict yet" if c.verdict == "unfinished" else "no verdict"
        facts = "; ".join(part for part in (record, lost_words(c)) if part)
        return f"{who} against {other}: {none}, {c.why} ({facts})."
    effect = effect_words(c, percent=c.percent is not None)
    facts = "; ".join(part for part in (effect, record, lost_words(c), p_text(c)) if part)
    within = "the margin" if margin is None else f"{margin:g} %"
    small = f", a clear difference smaller than {within}" if c.small else ""
    said = {
        "better": f"{who} is ahead of {other}{small}",
        "worse": f"{who} is behind {other}{small}",
        "equal": f"{who} and {other} are equal within {within}",
        "unclear": f"No clear difference between {who} and {other}",
    }[c.verdict]
    text = f"{said} ({facts}).{detectable_text(c) if c.verdict == 'unclear' else ''}"
    return " ".join(part for part in (text, carried_words(c)) if part)


def detectable_text(c: Contrast) -> str:
    """What these seeds could have found."""
    if c.detectable is None:
        return ""
    size = f"{c.detectable:.3g}" if c.detectable_percent is None else f"{digits(c.detectable_percent)} %"
    return f" These {c.n} seeds would have found a difference of {size} four times out of five."


class Estimate(NamedTuple):
    """An effect between the ends of its interval, which are infinite where the interval has none, and the value itself
    where there is no interval."""

    low: float
    value: float
    high: float

    def without_interval(self) -> Estimate:
        return Estimate(self.value, self.value, self.value)


def estimate_of(c: Contrast, percent: bool) -> Estimate | None:
    """The effect in percent or in the endpoint's unit; None where it is not finite."""
    of = c.percent if percent else c.effect
    if of is None or of.value is None or not math.isfinite(of.value):
        return None
    low, high = (of.value, of.value) if of.interval is None else (of.interval.low, of.interval.high)
    return Estimate(low, of.value, high)


def percent_words(low: float, value: float, high: float, higher_is_better: bool = False) -> str:
    """An effect with its interval, as what it does to the value; beyond a factor of 2 as a factor.

    >>> percent_words(4.3, 9.26, 13.4), percent_words(-3.1, -0.8, 1.6), percent_words(-800, -743, -650)
    ('9.3 % lower [−13, −4.3]', '0.80 % higher [−1.6, +3.1]', '8.4× higher [7.5×, 9.0×]')
    >>> percent_words(-math.inf, 9.26, math.inf), percent_words(-math.inf, -743, -650)
    ('9.3 % lower [no bounds]', '8.4× higher [at least 7.5×]')
    >>> percent_words(-327, 21, 92), percent_words(-20, 60, 92)
    ('21 % lower [13× lower, 4.3× higher]', '2.5× lower [13× lower, 20 % higher]')
    """

    def signed(x: float) -> str:
        return f"{'−' if x < 0 else '+'}{digits(x)}"

    text = percent_text(value, higher_is_better)
    times = sorted(ratio(x, higher_is_better) for x in (low, high))
    one_side = times[0] >= 1 or times[1] <= 1
    far = times[0] <= 0.5 or times[1] >= 2
    if far and times[0] > 0 and math.isfinite(times[1]) and not ("×" in text and one_side):
        ends = ", ".join(percent_text(x, higher_is_better) for x in _by_value(low, high, higher_is_better))
    elif "×" in text:
        ends = times_between(low, high, higher_is_better)
    else:
        ends = between(low, high, signed) if higher_is_better else between(-high, -low, signed)
    return text if low == high else f"{text} [{ends}]"


def _by_value(low: float, high: float, higher_is_better: bool) -> tuple[float, float]:
    """The ends of an interval of percentages, that of the lower value first."""
    return (low, high) if higher_is_better else (high, low)


def own_words(low: float, value: float, high: float) -> str:
    """The same in the endpoint's unit.

    >>> own_words(-0.5, 0.25, math.inf)
    '+0.25 [at least −0.5]'
    """
    ends = "" if low == high else f" [{between(low, high, '{:+.2g}'.format)}]"
    return f"{value:+.2g}{ends}".replace("-", "−")


def effect_words(c: Contrast, percent: bool) -> str:
    """The effect with the interval that goes with its p; empty without a finite estimate."""
    estimate = estimate_of(c, percent)
    if estimate is None:
        return ""
    return percent_words(*estimate, c.higher_is_better) if percent else own_words(*estimate)


def p_text(c: Contrast) -> str:
    """The deciding test, with p before and after the adjustment."""
    if c.p is None or c.p_holm is None:
        return ""
    adjusted = f", {c.p_holm:.3g} after Holm for {c.family} comparisons" if c.family > 1 else ""
    return f"{c.test_name}, p = {c.p:.3g}{adjusted}"


def listed(items: Sequence[str]) -> str:
    """Names for a sentence: "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
