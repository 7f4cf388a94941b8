"""How many operations torch is asked for: on an accelerator each is a launch, and reading a value waits for it."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kourkoutas.torch import KourkoutasBeta

READ = "aten._local_scalar_dense.default"


class Operations(TorchDispatchMode):
    """Counts the operations under it."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[str(function)] += 1
        return function(*args, **(kwargs or {}))


def operations_of_a_step(make, tensors, **options):
    params = [torch.nn.Parameter(torch.ones(5, 5)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.ones(5, 5)
    optimizer = make(params, foreach=True, **options)
    optimizer.step()
    with Operations() as operations:
        optimizer.step()
    return operations.counts


def test_a_default_step_asks_for_fewer_operations_than_adam_and_reads_no_value():
    adam = operations_of_a_step(torch.optim.Adam, 32)
    ours = operations_of_a_step(KourkoutasBeta, 32)
    assert adam[READ] == 64
    assert ours[READ] == 0
    assert ours.total() <= 44 < adam.total()
    # Those on the tensors themselves: norm, 10 of the update; the copies are of scalars.
    on_lists = {name: n for name, n in ours.items() if "foreach" in name and "copy" not in name}
    assert sum(on_lists.values()) <= 12


@pytest.mark.parametrize("options", [{}, {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}, {"buckets": "shape"}])
def test_the_number_of_operations_does_not_grow_with_the_number_of_tensors(options):
    few, many = (operations_of_a_step(KourkoutasBeta, n, **options) for n in (8, 32))
    assert few == many
