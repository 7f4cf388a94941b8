"""Every case of the conformance table on the Optax front end.

In the eigenbasis every pattern of missing gradients makes stacks of other shapes, and so some fifty compilations. By
default all gradients are there; with missing ones its cases are slow.
"""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from kourkoutas.optax import kourkoutas_beta
from tests.conformance.table import CASES, CORE, EXTRA, Case, check

EXTRA_IDS = {f"{name}-float64" for name in EXTRA}
COMPLETE = [
    dataclasses.replace(case, id=f"{case.id}-complete", missing=False) for case in CASES if "basis" in case.options
]


def run(case: Case, *, jit: bool) -> dict[str, np.ndarray]:
    solver = kourkoutas_beta(case.lr, buckets=case.buckets, **case.options)
    update = jax.jit(solver.update) if jit else solver.update
    params = jax.tree.map(jax.numpy.asarray, case.params())
    state = solver.init(params)
    for grads in case.grads():
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert all(p.dtype == case.dtype for p in params.values())
    return {name: np.asarray(p) for name, p in params.items()}


def is_slow(case: Case) -> bool:
    """JAX without jit takes a fifth of a second per case: in float64 the options one by one are enough."""
    if "basis" in case.options:
        return case.missing or case.dtype == "float64"
    return case.id not in CORE or (case.dtype == "float64" and case.id not in EXTRA_IDS)


def marked(cases: list[Case]) -> list:
    return [pytest.param(case, id=case.id, marks=[pytest.mark.slow] if is_slow(case) else []) for case in cases]


@pytest.mark.parametrize("case", marked([*CASES, *COMPLETE]))
def test_case_agrees_with_the_oracle(case):
    with jax.enable_x64(case.dtype == "float64"):
        check(case, run(case, jit=False))


# Every pattern of missing gradients is a compilation of its own, so few cases with all the extras stand for the rest.
JITTED = [case for case in [*CASES, *COMPLETE] if case.id.startswith(("weight-decay-full-float32", "eigen-full-float"))]


@pytest.mark.parametrize("case", marked(JITTED))
def test_compiled_case_agrees_with_the_oracle(case):
    with jax.enable_x64(case.dtype == "float64"):
        check(case, run(case, jit=True))
