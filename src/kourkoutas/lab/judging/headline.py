"""The answer of a study in sentences, by the one rule: the primary endpoint decides, and the headline hides nothing.

NOTE: what is not clear is never called equal, and an unfinished study has no verdict: a look at a study that is still
growing is one more chance of a false answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.intervals import CONFIDENCE
from kourkoutas.lab.judging.statistics import UNDEFINED, between
from kourkoutas.lab.specs.looks import label

MOST_TREATMENTS = 2  # with more, as in a grid, the headline counts
MOST_SECONDARY = 3
NOTHING = "There is nothing to compare: no two optimizers have a finished seed in common."

RULE = (
    "The primary endpoint decides. A difference is clear where the two-sided p of the paired t test over the seeds, or "
    "of Wilcoxon's signed ranks where a run diverged or failed, is below {level:.2g} after Holm's adjustment for all "
    "planned contrasts{counted}. Intervals are adjusted like p."
)
COUNTED = ", with what an optimizer may have lost by the luck of its tuning counted"


def rule(*, tuned: bool) -> str:
    return RULE.format(level=1 - CONFIDENCE, counted=COUNTED if tuned else "")


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
    lines = [_about(treatment, own) for treatment, own in by_treatment.items()]
    lines += _lacking(first.missing)
    lines += _secondary(first, endpoints[1:])
    return " ".join(lines)


def _about(treatment: str, contrasts: Sequence[Contrast]) -> str:
    who, groups = label(treatment), dict[str, list[Contrast]]()
    for c in contrasts:
        groups.setdefault(c.verdict, []).append(c)
    clear = [size(c) for verdict in ("better", "worse") for c in groups.get(verdict, ())]
    lines = [f"{who} is {listed(clear)} on the deciding endpoint."] if clear else []
    if unclear := groups.get("unclear"):
        if len(unclear) == len(contrasts) > 1 and not any(c.lost for c in unclear):
            lines.append("No clear winner on the deciding endpoint.")
        else:
            named = ", nor from ".join(_with_lost(c) for c in unclear)
            if len(unclear) == 1:
                lines.append(f"No clear difference between {who} and {_with_lost(unclear[0])}.")
            else:
                lines.append(f"{who} is not clearly different from {named}.")
    if same := groups.get("identical"):
        lines.append(f"{who} ends exactly like {listed([label(c.baseline) for c in same])}.")
    if untested := groups.get("untested"):
        others = listed([label(c.baseline) for c in untested])
        lines.append(f"{who} cannot be compared with {others}: {_why_untested(untested)}.")
    return " ".join(lines)


def _lacking(missing: Sequence[tuple[str, str]]) -> list[str]:
    names = list(dict.fromkeys(label(b) for _, b in missing))
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
            lines.append(f"On {endpoint.title} {label(treatment)} is {sizes}{f', {won(own[0])}' if alike else ''}.")
    rest = len(lines) - MOST_SECONDARY
    return [*lines[:MOST_SECONDARY], f"{rest} more secondary results are clear."] if rest > 0 else lines


def ratio(percent: float, higher_is_better: bool) -> float:
    """treatment/baseline of so many percent better."""
    return 1 + percent / 100 if higher_is_better else 1 - percent / 100


def percent_text(percent: float, higher_is_better: bool) -> str:
    """A size without a sign; beyond a factor of 2 as one.

    >>> percent_text(-743.2, False), percent_text(3.14, False), percent_text(88.1, False)
    ('8.4× higher', '3.1 %', '8.4× lower')
    """
    times = ratio(percent, higher_is_better)
    if times >= 2:
        return f"{digits(times)}× higher"
    if 0 < times <= 0.5:
        return f"{digits(1 / times)}× lower"
    return f"{digits(percent)} %"


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

    >>> [digits(x) for x in (0.8123, 9.0, 41.4, -312.2, 0.0)]
    ['0.81', '9.0', '41', '312', '0']
    """
    size = abs(value)
    if size >= 1e5 or 0 < size < 1e-3:
        return f"{size:.2g}"
    return f"{size:.0f}" if size >= 9.95 or size == 0 else f"{size:#.2g}"


def size(c: Contrast) -> str:
    """How far the treatment is ahead or behind, and of whom: "3.1 % behind Adam 0.999"."""
    ahead = c.verdict == "better" if c.verdict in ("better", "worse") else c.side > 0
    of = f"{'ahead of' if ahead else 'behind'} {label(c.baseline)}"
    percent = c.percent.value if c.percent is not None else None
    text = ""
    if percent is not None and math.isfinite(percent) and (percent > 0) == ahead:
        text = percent_text(percent, c.higher_is_better)
    aside = "; ".join(part for part in ("" if text.endswith("%") else text, lost_words(c)) if part)
    return (f"{text} " if text.endswith("%") else "") + of + (f" ({aside})" if aside else "")


def won(c: Contrast) -> str:
    """On how many seeds the side that is ahead won."""
    count = c.wins if c.verdict == "better" else c.losses
    return f"on all {c.n} seeds" if count == c.n else f"on {count} of {c.n} seeds"


def lost_words(c: Contrast) -> str:
    """How many runs of whom diverged or failed."""
    parts = [
        f"{count} of {c.n} of {label(arm)} {how}"
        for arm, counts in ((c.baseline, (c.diverged[1], c.failed[1])), (c.treatment, (c.diverged[0], c.failed[0])))
        for count, how in zip(counts, ("diverged", "failed"), strict=True)
        if count
    ]
    return ", ".join(parts)


def _with_lost(c: Contrast) -> str:
    lost = lost_words(c)
    return f"{label(c.baseline)} ({lost})" if lost else label(c.baseline)


def _why_untested(contrasts: Sequence[Contrast]) -> str:
    if max(c.n for c in contrasts) == 1:
        return "one seed is too few"
    if all(c.ties == c.n for c in contrasts):
        return "no run gave a value"
    return "too few pairs of finished runs, or differences without variance"


def _counts(contrasts: Sequence[Contrast]) -> str:
    words = {
        "better": "the first named is ahead",
        "worse": "it is behind",
        "unclear": "there is no clear difference",
        "identical": "both end alike",
        "untested": "nothing can be said",
    }
    counts = [f"in {k} {text}" for v, text in words.items() if (k := sum(c.verdict == v for c in contrasts))]
    return f"Of {len(contrasts)} comparisons, {listed(counts)}."


def answer(c: Contrast) -> str:
    """One contrast in full: what is clear, with the numbers that decide."""
    who, other = label(c.treatment), label(c.baseline)
    record = f"better on {c.wins} of {c.n} seeds" + (f", equal on {c.ties}" if c.ties else "")
    if c.verdict == "identical":
        return f"{who} and {other} end with the same value on all {c.n} seeds."
    if c.verdict == "untested":
        why = next((note for note in c.notes if note.endswith(UNDEFINED)), "too few pairs")
        return f"{who} against {other}: {why} ({record})."
    effect = effect_words(c, percent=c.percent is not None)
    facts = "; ".join(part for part in (effect, record, lost_words(c), p_text(c)) if part)
    if c.verdict in ("better", "worse"):
        return f"{who} is {'ahead of' if c.verdict == 'better' else 'behind'} {other} ({facts})."
    return f"No clear difference between {who} and {other} ({facts}).{detectable_text(c)}"


def detectable_text(c: Contrast) -> str:
    """What these seeds could have found."""
    if c.detectable is None:
        floor = 2.0 ** (1 - (c.wins + c.losses))
        if c.lost and c.family * floor > 1 - CONFIDENCE:
            return f" Ranks of {c.wins + c.losses} pairs cannot give p below {min(1.0, c.family * floor):.3g}."
        return ""
    size = f"{c.detectable:.3g}" if c.detectable_percent is None else f"{digits(c.detectable_percent)} %"
    return f" These {c.n} seeds would have found a difference of {size} four times out of five."


def ends_of(c: Contrast, percent: bool) -> tuple[float, float, float] | None:
    """(low, estimate, high) in percent or in the endpoint's unit; None without a finite estimate.

    Ends are infinite where the interval has none, and equal to the estimate where there is no interval.
    """
    of = c.percent if percent else c.effect
    if of is None or of.value is None or not math.isfinite(of.value):
        return None
    return (of.value,) * 3 if of.interval is None else (of.interval.low, of.value, of.interval.high)


def percent_words(low: float, value: float, high: float, higher_is_better: bool = False) -> str:
    """An effect with its interval; beyond a factor of 2 as a factor.

    >>> percent_words(4.3, 9.26, 13.4), percent_words(-3.1, -0.8, 1.6), percent_words(-800, -743, -650)
    ('+9.3 % [+4.3, +13]', '−0.80 % [−3.1, +1.6]', '8.4× higher [7.5×, 9.0×]')
    >>> percent_words(-math.inf, 9.26, math.inf), percent_words(-math.inf, -743, -650)
    ('+9.3 % [no bounds]', '8.4× higher [at least 7.5×]')
    """

    def signed(x: float) -> str:
        return f"{'−' if x < 0 else '+'}{digits(x)}"

    text, ends = percent_text(value, higher_is_better), times_between(low, high, higher_is_better)
    if text.endswith("%"):
        text, ends = f"{signed(value)} %", between(low, high, signed)
    return text if low == high else f"{text} [{ends}]"


def own_words(low: float, value: float, high: float) -> str:
    """The same in the endpoint's unit.

    >>> own_words(-0.5, 0.25, math.inf)
    '+0.25 [at least −0.5]'
    """
    ends = "" if low == high else f" [{between(low, high, '{:+.2g}'.format)}]"
    return f"{value:+.2g}{ends}".replace("-", "−")


def effect_words(c: Contrast, percent: bool) -> str:
    """The effect with the interval that goes with its p; empty without a finite estimate."""
    ends = ends_of(c, percent)
    if ends is None:
        return ""
    return percent_words(*ends, c.higher_is_better) if percent else own_words(*ends)


def p_text(c: Contrast) -> str:
    """The deciding test, with p before and after the adjustment."""
    if c.p is None or c.p_holm is None:
        return ""
    adjusted = f", {c.p_holm:.3g} after Holm for {c.family} contrasts" if c.family > 1 else ""
    return f"{c.test_name}, p = {c.p:.3g}{adjusted}"


def listed(items: Sequence[str]) -> str:
    """Names for a sentence: "a, b and c"."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
