"""What to do next: the one command that would settle what a study leaves open, and a sentence for a paper.

NOTE: more seeds for an answer that was looked at are one more chance of a false one, so what is unclear is asked again
with new seeds in a new folder.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from kourkoutas.lab.errors import argument, in_python
from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.failures import repeat
from kourkoutas.lab.judging.fairness import short_runs, tuning_range
from kourkoutas.lab.judging.headline import effect_words, lost_words, p_text
from kourkoutas.lab.judging.values import seed_ranges
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.planning.contrasts import Family
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StudyRecord

MOST_SEEDS = 100  # beyond, the difference is smaller than most would care for
WITHOUT_VERDICT = ("untested", "unfinished")


def next_step(snapshot: Snapshot, primary: Comparison) -> str:
    """ "Next: COMMAND", with a reason before it; empty where everything is settled or nothing was compared."""
    record, verdicts = snapshot.record, {c.verdict for c in primary.contrasts}
    if "unfinished" in verdicts:
        return f"Next, to make the failed runs again: {repeat(record)}"
    if not verdicts:
        return ""
    if record.code is None and record.preset == "smoke":
        return f"Next, for evidence: {_changed(snapshot, 'laptop', preset='laptop')}"
    if record.tuning is None:
        return f"Next, for a fair answer: {_changed(snapshot, 'tuned', tune=tuning_range(snapshot))}"
    if short_runs(snapshot):
        arms = ["kbeta-exact", *(arm.optimizer for arm in record.arms if arm.optimizer not in ("kbeta", "kbeta-exact"))]
        asked = ",".join(dict.fromkeys(arms))
        return f"Next, without the warmup that short runs do not leave: {_changed(snapshot, 'exact', optimizers=asked)}"
    first = max(record.seeds) + 1
    if "untested" in verdicts:
        least = Family(primary.contrasts[0].family).least_pairs
        if len(record.seeds) >= least:
            return ""
        lowest = min(record.seeds)
        return f"Next, for enough seeds: {_changed(snapshot, seeds=f'{lowest}-{lowest + least - 1}')}"
    unclear = [c for c in primary.contrasts if c.verdict == "unclear"]
    if not unclear:
        return ""
    widest = max(unclear, key=_seeds_needed)
    needed = _seeds_needed(widest)
    if needed > MOST_SEEDS:
        return f"{widest.name}: a difference as small as this one takes more than {MOST_SEEDS} seeds to be clear."
    command = _changed(snapshot, "more", seeds=f"{first}-{first + needed - 1}")
    return f"Next, with as many new seeds as a difference of this size needs: {command}"


def _seeds_needed(c: Contrast) -> int:
    """n·(d₁/d)², where n seeds find a difference d₁ four times out of five; at least twice as many as there were."""
    effect = None if c.effect is None else c.effect.value
    if c.detectable is None or effect is None or not math.isfinite(effect):
        return 2 * c.n
    size, found = (abs(math.log(x)) if c.log else abs(x) for x in (effect, c.detectable))
    return 10**9 if size == 0 else max(2 * c.n, math.ceil(c.n * (found / size) ** 2))


def _changed(snapshot: Snapshot, folder: str = "", **options: str) -> str:
    """The command of a study with other options, and, if `folder` is given, with a results folder of that ending."""
    record = snapshot.record
    words = _words(record)
    if words is None:
        with in_python():
            return "the same study with " + ", ".join(argument(name, value) for name, value in options.items())
    if folder:
        before = words[words.index("--out") + 1] if "--out" in words else f"results/{snapshot.path.name}"
        options["out"] = f"{before.rstrip('/')}-{folder}"
    for name, value in options.items():
        flag = f"--{name}"
        words = [word for word in words if not word.startswith(f"{flag}=")]
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return shlex.join(words)


def _words(record: StudyRecord) -> list[str] | None:
    """The words of the study's command; None where it was called from Python."""
    try:
        words = shlex.split(record.command)
    except ValueError:
        return None
    return words if "study" in words else None


def for_a_paper(snapshot: Snapshot, primary: Comparison, tuned: Sequence[str]) -> str:
    """What was found, in sentences that can be pasted into a paper; empty before a comparison has a verdict.

    Args:
      tuned: how the optimizers came by their learning rates.
    """
    record = snapshot.record
    found = [_in_a_paper(c, primary) for c in primary.contrasts if c.verdict not in WITHOUT_VERDICT]
    if not found:
        return ""
    on = record.testbed if record.code is not None else f"{record.testbed} ({record.preset}, {record.engine})"
    versions = [
        f"{name} {record.versions[name]}"
        for name in ("kourkoutas-beta", "torch", "jax", "mlx")
        if name in record.versions
    ]
    made = f"; made with {', '.join(versions)}" if versions else ""
    return " ".join([f"On {on}, seeds {seed_ranges(record.seeds)}:", *found, *tuned[:1]]).rstrip(".") + f"{made}."


def _in_a_paper(c: Contrast, primary: Comparison) -> str:
    who, other = name_of(c.treatment), name_of(c.baseline)
    if c.verdict == "identical":
        return f"{who} and {other} end with the same {primary.title} on all {c.n} seeds."
    said = {
        "better": f"{who} is better than {other}",
        "worse": f"{who} is worse than {other}",
        "equal": f"{who} and {other} are equal within the margin",
        "unclear": f"there is no clear difference between {who} and {other}",
    }[c.verdict]
    effect = effect_words(c, percent=c.percent is not None)
    won = f"better on {c.wins} of {c.n} seeds"
    size = f"{primary.title} {effect}" if effect else ""
    facts = "; ".join(part for part in (size, won, lost_words(c), p_text(c)) if part)
    return f"{said[0].upper()}{said[1:]} ({facts})."
