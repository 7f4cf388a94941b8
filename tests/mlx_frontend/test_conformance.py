"""The MLX front end against the oracle, on every case of the shared table."""

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from kourkoutas.mlx import KourkoutasBeta
from kourkoutas.rule import HYPER_NAMES
from tests.conformance.table import CASES, Case, check, marked


def run(case: Case) -> dict[str, np.ndarray]:
    """MLX works in float32 by default; float64 exists on the CPU only, where numbers must be given as arrays."""
    dtype = getattr(mx, case.dtype)
    options = {name: getattr(case.hyper, name) for name in HYPER_NAMES}
    options["alpha"] = mx.array(case.hyper.alpha, dtype)
    optimizer = KourkoutasBeta(mx.array(case.lr, dtype), buckets=case.buckets, **options)
    params = tree_unflatten([(name, mx.array(p, dtype)) for name, p in case.params().items()])
    optimizer.init(params)
    for step in case.grads():
        grads = tree_unflatten([(name, mx.array(g, dtype)) for name, g in step.items() if g is not None] or {})
        flat = dict(tree_flatten(params))
        flat.update(tree_flatten(optimizer.apply_gradients(grads, params)))
        params = tree_unflatten(flat)
    assert len(optimizer.state["m"]) == len(case.shapes)
    return {name: np.array(p) for name, p in tree_flatten(params)}


@pytest.mark.parametrize("case", marked(CASES))
def test_the_optimizer_follows_the_oracle(case):
    with mx.stream(mx.cpu):
        check(case, run(case))
