"""The tuning of a study: makes the runs that `kourkoutas.lab.judging.tuning` asks for, and reads them back.

NOTE: nothing but runs is kept. After a kill the decisions are taken again from the runs that have finished; they are
the same, so that only what is missing is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kourkoutas.lab.judging import tuning as judging
from kourkoutas.lab.judging.tuned import score
from kourkoutas.lab.judging.tuning import Values
from kourkoutas.lab.results import store
from kourkoutas.lab.specs.plan import Plan
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from kourkoutas.lab.specs.tuning import Value
from kourkoutas.lab.testbeds import Endpoint


def tune(
    plan: Plan, study: store.Writer, make: Callable[[Sequence[RunSpec]], None], *, endpoint: Endpoint
) -> dict[str, dict[str, Value]]:
    """{arm: its best values}; `make` makes those of the runs that are not there yet.

    Raises:
      ValueError: every tuning run of an arm failed.
    """
    question = plan.tuning
    if question is None:
        raise ValueError("the plan has no tuning: give it one, for example --tune lr=1e-4:1e-1")
    arms = {arm.label: arm for arm in plan.arms}
    asked: list[RunSpec] = []

    def measure(requests: Sequence[tuple[str, Values]]) -> list[tuple[float, ...]]:
        valued = [plan.valued(arms[label], values) for label, values in requests]
        specs = [plan.spec(arm, seed) for seed in question.seeds for arm in valued]
        asked.extend(specs)
        make(specs)
        return [tuple(score(study.run(plan.spec(arm, seed)), endpoint) for seed in question.seeds) for arm in valued]

    def takes(label: str, values: Values) -> bool:
        try:
            plan.valued(arms[label], values)
        except (ValueError, TypeError):
            return False
        return True

    tried = judging.tune(question, plan.axes(), measure, takes, maximize=endpoint.maximize)
    for label in tried:
        _check_some_value(label, [study.result(spec) for spec in asked if spec.optimizer == label])
    return {label: dict(judging.best(own, endpoint.maximize).values) for label, own in tried.items()}


def _check_some_value(label: str, results: Sequence[RunResult | None]) -> None:
    """Divergence everywhere is a result; an error everywhere is not."""
    errors = [result.error for result in results if result is not None and result.status == "failed"]
    if results and len(errors) == len(results):
        lines = (errors[0] or "no reason recorded").strip().splitlines()
        raise ValueError(
            f"all {len(results)} tuning runs of {label} failed, so that nothing can be chosen for it; the first one: "
            f"{lines[-1].strip()}. Correct that and use --retry-failed"
        )
