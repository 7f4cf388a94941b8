"""Every case of the conformance table, through the Triton kernels."""

import numpy as np
import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from tests.conformance.table import CASES, Case, check, marked
from tests.gpu.conftest import DEVICE


def run(case: Case) -> dict[str, np.ndarray]:
    params = {name: torch.nn.Parameter(torch.from_numpy(np.array(p)).to(DEVICE)) for name, p in case.params().items()}
    optimizer = KourkoutasBeta(params.items(), lr=case.lr, buckets=case.buckets, **case.options)
    for grads in case.grads():
        for name, g in grads.items():
            params[name].grad = None if g is None else torch.from_numpy(np.array(g)).to(DEVICE)
        optimizer.step()
        assert [route.name for route in optimizer.route()] == ["triton"]
    return {name: p.detach().cpu().numpy() for name, p in params.items()}


PLAIN = [case for case in CASES if "basis" not in case.options]  # the eigenbasis has a step of its own


@pytest.mark.parametrize("case", marked(PLAIN))
def test_agrees_with_the_oracle(case):
    check(case, run(case))
