"""Every case of the conformance table, on each way through the PyTorch front end."""

import numpy as np
import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from tests.conformance.table import CASES, Case, case_ids, check

ROUTES = {
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},  # the native kernel, if it was built
    "fused-adam": {"fused": True},  # with the native kernel turned off, by conftest.py
    "capturable": {"capturable": True, "fused": False},
    "capturable-foreach": {"capturable": True, "foreach": True},
    "triton": {"capturable": True},  # interpreted on the CPU, by conftest.py
}


def run(case: Case, **route: bool) -> dict[str, np.ndarray]:
    params = {name: torch.nn.Parameter(torch.from_numpy(np.array(p))) for name, p in case.params().items()}
    optimizer = KourkoutasBeta(params.items(), lr=case.lr, buckets=case.buckets, **case.options, **route)
    for grads in case.grads():
        for name, g in grads.items():
            params[name].grad = None if g is None else torch.from_numpy(np.array(g))
        optimizer.step()
    return {name: p.detach().numpy() for name, p in params.items()}


# The scalars of "capturable-foreach" are those of "capturable", its update that of "foreach"; "triton" takes its time.
SLOW = ("capturable-foreach", "triton")
BY_DEFAULT = [pytest.param(route, marks=pytest.mark.slow) if route in SLOW else route for route in ROUTES]


@pytest.mark.parametrize("route", BY_DEFAULT)
@pytest.mark.parametrize("case", CASES, ids=case_ids())
def test_agrees_with_the_oracle(case, route):
    check(case, run(case, **ROUTES[route]))
