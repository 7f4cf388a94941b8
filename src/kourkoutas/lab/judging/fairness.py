"""Whether a comparison is fair: how the arms came by their learning rates, and whether K-β had the steps that its
default needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kourkoutas.lab.errors import argument
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.specs.spec import RunResult
from kourkoutas.lab.tuning import trials
from kourkoutas.lab.tuning.trials import Tried
from kourkoutas.rule import Hyper

SMOKE = "Smoke: not evidence."
SHORT = 2000  # steps below which the hidden warmup of K-β's default takes much of a run


def fairness(snapshot: Snapshot, tried: Mapping[str, Sequence[Tried]]) -> list[str]:
    """For the head of every account of a study.

    Args:
      tried: what its tuning tried.
    """
    lines = _not_tuned(snapshot) if snapshot.record.tuning is None else trials.told(snapshot, tried)
    return [*lines, *short_runs(snapshot)]


def _not_tuned(snapshot: Snapshot) -> list[str]:
    return [f"{_how_untuned(_rates(snapshot))}: add {argument('tune', tuning_range(snapshot))} for a fair answer."]


def tuning_range(snapshot: Snapshot) -> str:
    """What to tune: ten times less to ten times more than the learning rates that the runs were made with."""
    rates = _rates(snapshot)
    low, high = (_power(min(rates) / 10), _power(max(rates) * 10)) if rates else ("LOW", "HIGH")
    return f"lr={low}:{high}"


def _how_untuned(rates: Sequence[float]) -> str:
    return "One learning rate for all" if len(rates) < 2 else "Learning rates that nobody tuned"


def with_conditions(answer: str, snapshot: Snapshot) -> str:
    """The answer of a study with what nobody may read it without: that it is a smoke test, that nothing was tuned."""
    record = snapshot.record
    before = [SMOKE] if record.code is None and record.preset == "smoke" else []
    after = [f"{_how_untuned(_rates(snapshot))}."] if record.tuning is None else []
    return " ".join([*before, answer, *after])


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
        steps, options = steps_made(run.result), run.result.settings.get("optimizer")
        if not isinstance(options, Mapping) or options.get("family") != "kbeta" or not 0 < steps < SHORT:
            continue
        # A user's own function leaves out what it leaves at its default.
        defaults = Hyper()
        low, high = options.get("beta2_min", defaults.beta2_min), options.get("beta2_max", defaults.beta2_max)
        correction = options.get("bias_correction", defaults.bias_correction)
        if correction == "beta2max" and low < high:
            part = math.sqrt((1 - high) / (1 - (low + high) / 2))
            return [
                f"Short runs ({steps:.0f} steps): K-β's default starts at {100 * part:.0f} % of the learning rate. "
                'Try bias_correction="exact" (kbeta-exact).'
            ]
    return []


def steps_made(result: RunResult) -> float:
    """How many steps a run made, by its optimizer's count, else the last one that it logged; 0 where nobody knows.

    NOTE: a function of a user's may log epochs, or only once at the end: what the optimizer has counted goes first.
    """
    logged = max(result.curve.get("step", ()), default=0.0)
    return logged if result.updates is None else result.updates
