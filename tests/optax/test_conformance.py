"""Every case of the conformance table on the Optax front end."""

import jax
import numpy as np
import optax
import pytest

from kourkoutas.optax import kourkoutas_beta
from tests.conformance.table import CASES, CORE, EXTRA, Case, check

EXTRA_IDS = {f"{name}-float64" for name in EXTRA}


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


def is_by_default(case: Case) -> bool:
    """JAX without jit takes a fifth of a second per case: in float64 the options one by one are enough."""
    return case.dtype == "float32" or case.id in EXTRA_IDS


BY_DEFAULT = [
    pytest.param(case, id=case.id, marks=[] if case.id in CORE and is_by_default(case) else [pytest.mark.slow])
    for case in CASES
]


@pytest.mark.parametrize("case", BY_DEFAULT)
def test_case_agrees_with_the_oracle(case):
    with jax.enable_x64(case.dtype == "float64"):
        check(case, run(case, jit=False))


# Every pattern of missing gradients is a compilation of its own, so few cases with all the extras stand for the rest.
JITTED = [case for case in CASES if case.id.startswith("weight-decay-full") or case.id == "eigen-full-float64"]


@pytest.mark.parametrize("case", JITTED, ids=[case.id for case in JITTED])
def test_compiled_case_agrees_with_the_oracle(case):
    with jax.enable_x64(case.dtype == "float64"):
        check(case, run(case, jit=True))
