"""How well each memory would have predicted the recorded norms, as tables: what `kbeta norms` prints."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

from kourkoutas.lab.judging import beta2_forecast as forecast
from kourkoutas.lab.judging.beta2_forecast import Forecasts
from kourkoutas.lab.results.store import StoredRun, StoreError

NOTE = (
    "Adam's second moment is a forecast of the next squared gradient, and β2 says how much of the past it counts. From "
    "the recorded norms: which β would have forecast them best? The loss is QLIKE, in nats per step; 0 is the best "
    "memory of a stretch. A norm of more than ten times its forecast counts as ten times. It says what predicts the "
    "norms, and not which β2 trains best."
)

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # head and rows


def of_arm(runs: Sequence[StoredRun], arm: str) -> Forecasts | None:
    """The mean over an arm's runs of the same length; None if none has norms."""
    found = []
    for run in [run for run in runs if run.spec.optimizer == arm]:
        with contextlib.suppress(StoreError):  # a damaged trace costs its own part, not the rest
            trace = run.trace()
            if trace is not None and len(trace.get("every_step", ())) > forecast.STRETCHES:
                names = [str(name) for name in trace["names"]]
                found.append(forecast.examine(names, trace["every_step"], trace["every_norm"]))
    longest = max((one.edges for one in found), key=lambda edges: edges[-1], default=())
    alike = [one for one in found if one.edges == longest and one.names == found[0].names]
    return forecast.over_runs(alike) if alike else None


def _stretches(found: Forecasts) -> list[str]:
    """The names of the stretches: "steps 1 to 500"."""
    return [f"steps {low} to {high - 1}" for low, high in itertools.pairwise(found.edges)]


def table(found: Forecasts) -> Table:
    """Of each stretch, the best memory and what the others lose."""
    head = ("stretch", "best β", *(f"β {beta:g}" for beta in found.betas))
    rows = zip(_stretches(found), found.pooled_best, found.pooled, strict=True)
    return head, [(name, f"{best:g}", *(f"{x:.3g}" for x in excess)) for name, best, excess in rows]


def buckets(found: Forecasts) -> Table:
    """The best β of each bucket, by stretch."""
    rows = [(name, *(f"{b:g}" for b in found.best[:, k])) for k, name in enumerate(found.names)]
    return ("bucket", *_stretches(found)), rows
