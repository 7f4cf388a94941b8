"""Every case of the conformance table, on each way through the PyTorch front end."""

import numpy as np
import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from tests.conformance.table import CASES, Case, check, marked
from tests.torch_frontend.routes import on_every_route


def run(case: Case, **route: bool) -> dict[str, np.ndarray]:
    params = {name: torch.nn.Parameter(torch.from_numpy(np.array(p))) for name, p in case.params().items()}
    optimizer = KourkoutasBeta(params.items(), lr=case.lr, buckets=case.buckets, **case.options, **route)
    for grads in case.grads():
        for name, g in grads.items():
            params[name].grad = None if g is None else torch.from_numpy(np.array(g))
        optimizer.step()
    return {name: p.detach().numpy() for name, p in params.items()}


PLAIN = [case for case in CASES if "basis" not in case.options]
EIGEN = [case for case in CASES if "basis" in case.options]


@on_every_route
@pytest.mark.parametrize("case", marked(PLAIN))
def test_agrees_with_the_oracle(case, route):
    check(case, run(case, **route))


@pytest.mark.parametrize("case", EIGEN, ids=[case.id for case in EIGEN])
def test_the_eigenbasis_agrees_with_the_oracle(case):
    check(case, run(case))
