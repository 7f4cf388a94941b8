"""What a difference between kbeta and Adam comes from, cause by cause, as far as the control arms show.

`attribution` gives each cause its share of the difference; here each contrast that isolates a cause is tested, with
Holm's adjustment for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from kourkoutas.lab.judging.stats import Comparison, Contrast, compare_pairs
from kourkoutas.lab.judging.tables import show_ci
from kourkoutas.lab.judging.values import Values
from kourkoutas.lab.specs.optimizers import CONTROLS


def size_of(c: Contrast, log: bool) -> str:
    """The effect with its interval, e.g. "1.099 [1.045, 1.155]"."""
    effect = c.ratio if log else c.difference
    return show_ci(effect.value, effect.ci, 4) if effect else "no pair of finite runs"


@dataclass(frozen=True)
class Question:
    """One possible cause, and the contrasts that isolate it."""

    cause: str
    why: str
    pairs: tuple[tuple[str, str], ...]


QUESTIONS = (
    Question(
        "Dynamics",
        "kbeta-static keeps β2 at the midpoint and all else as kbeta: what differs is that β2 moves.",
        (("kbeta", "kbeta-static"),),
    ),
    Question(
        "Mean β2",
        "adam-mid is Adam at the midpoint β2. Against adam95 and adam999 it shows what that value alone changes; kbeta "
        "and kbeta-static against it show what the value does not explain.",
        (("adam-mid", "adam95"), ("adam-mid", "adam999"), ("kbeta", "adam-mid"), ("kbeta-static", "adam-mid")),
    ),
    Question(
        "Hidden warmup",
        "Bias correction by β2_max scales the early steps of kbeta by about √(1 − 0.999^t). The -warm arms give Adam "
        "the same factor; kbeta-exact takes it away from kbeta; kbeta-static and adam-mid differ in nothing else.",
        (
            ("adam95-warm", "adam95"),
            ("adam999-warm", "adam999"),
            ("kbeta", "adam95-warm"),
            ("kbeta", "adam999-warm"),
            ("kbeta", "kbeta-exact"),
            ("kbeta-static", "adam-mid"),
        ),
    ),
)


@dataclass(frozen=True)
class Isolated:
    """One contrast that isolates a cause: the arms, the effect, and what the data support."""

    treatment: str
    baseline: str
    effect: str
    record: str
    supported: bool
    sentence: str


@dataclass(frozen=True)
class Cause:
    cause: str
    why: str
    findings: tuple[Isolated, ...]


@dataclass(frozen=True)
class Causes:
    """The causes whose arms were run, and one summary per baseline of the difference to explain."""

    causes: tuple[Cause, ...]
    summaries: tuple[str, ...]


def examine(
    values: Values,
    *,
    log: bool,
    higher_is_better: bool,
    arms: Collection[str] = (),
    verdicts: Mapping[tuple[str, str], str] | None = None,
    counted: Callable[[Comparison], Comparison] = lambda comparison: comparison,
) -> Causes | None:
    """What the control arms support; None without controls.

    Args:
      values: arm → seed → value.
      log: analyse log10 of the values.
      higher_is_better: for accuracies and the like.
      arms: of the study, those without values too; contrasts of theirs count in Holm's family.
      verdicts: {(treatment, baseline): verdict} of the endpoint; a difference that they do not show needs no cause.
      counted: what the study does to its comparisons before it takes verdicts from them.
    """
    if not any(arm in values for arm in CONTROLS):
        return None
    wanted = [pair for q in QUESTIONS for pair in q.pairs] + [("kbeta", "adam95"), ("kbeta", "adam999")]
    pairs = list(dict.fromkeys(_possible(values, wanted)))
    if not pairs:
        return None
    planned = {(a, b) for a, b in wanted if {a, b} <= {*values, *arms}}
    comparison = compare_pairs(values, pairs, log=log, higher_is_better=higher_is_better, family=len(planned))
    comparison = counted(comparison)
    found = {(c.treatment, c.baseline): c for c in comparison.contrasts}
    causes = tuple(
        Cause(q.cause, q.why, tuple(_finding(found[pair], log) for pair in q.pairs if pair in found))
        for q in QUESTIONS
        if any(pair in found for pair in q.pairs)
    )
    summaries = [
        _explain(found, baseline, log, verdicts or {})
        for baseline in ("adam95", "adam999")
        if ("kbeta", baseline) in found
    ]
    return Causes(causes, tuple(summaries))


def _possible(values: Values, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in pairs if a in values and b in values and not values[a].keys().isdisjoint(values[b])]


def _finding(c: Contrast, log: bool) -> Isolated:
    sentence = {
        "better": f"Supported: {c.treatment} ends better than {c.baseline}.",
        "worse": f"Supported: {c.treatment} ends worse than {c.baseline}.",
        "unclear": "Not supported: the data do not exclude that there is no difference.",
        "identical": "No difference: equal on every seed.",
        "untested": "Not tested: too few finite pairs, or no variance.",
    }[c.verdict]
    if c.verdict in ("better", "worse") and (c.diverged_treatment or c.diverged_baseline):
        sentence += " (By ranks: runs diverged.)"
    record = f"{c.wins}/{c.ties}/{c.losses}"
    return Isolated(c.treatment, c.baseline, size_of(c, log), record, c.verdict in ("better", "worse"), sentence)


def _explain(
    found: Mapping[tuple[str, str], Contrast], baseline: str, log: bool, shown: Mapping[tuple[str, str], str]
) -> str:
    """Which single causes move the result the way kbeta differs from `baseline`."""
    main = found["kbeta", baseline]
    headline = shown.get(("kbeta", baseline)) or shown.get((baseline, "kbeta"), main.verdict)
    if not {main.verdict, headline} <= {"better", "worse"}:
        return f"kbeta against {baseline} ({size_of(main, log)}): the data support no difference that needs a cause."
    causes = {
        "the dynamics of β2": [("kbeta", "kbeta-static")],
        "the mean value of β2": [("adam-mid", baseline)],
        "the hidden warmup": [(f"{baseline}-warm", baseline), ("kbeta", "kbeta-exact"), ("kbeta-static", "adam-mid")],
    }
    words: dict[str, list[str]] = {"yes": [], "no": [], "against": [], "open": []}
    for cause, pairs in causes.items():
        verdicts = [found[pair].verdict for pair in pairs if pair in found]
        if not verdicts:
            words["open"].append(cause)
        elif main.verdict in verdicts:
            mixed = f" (in {verdicts.count(main.verdict)} of {len(verdicts)} contrasts)" if len(verdicts) > 1 else ""
            words["yes"].append(cause + mixed)
        elif any(v in ("better", "worse") for v in verdicts):
            words["against"].append(cause)
        else:
            words["no"].append(cause)
    text = f"kbeta ends {main.verdict} than {baseline} ({size_of(main, log)})."
    endings = (
        ("yes", "The data support as a cause: {}."),
        ("against", "Acting the other way: {}."),
        ("no", "Not supported as a cause: {}."),
        ("open", "Not examined, for lack of the arm: {}."),
    )
    text += "".join(" " + ending.format(", ".join(words[key])) for key, ending in endings if words[key])
    left = found.get(("kbeta", f"{baseline}-warm"))
    if left is not None and left.verdict != "untested":
        rest = (
            "a difference remains"
            if left.verdict == main.verdict
            else f"kbeta ends {left.verdict}"
            if left.verdict in ("better", "worse")
            else "the data support no remaining difference"
        )
        text += f" Against {baseline} with the same warmup {rest} ({size_of(left, log)})."
    return text
