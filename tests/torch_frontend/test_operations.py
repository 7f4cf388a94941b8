"""What a step asks torch for: on an accelerator each operation is a launch, and reading a value waits for it.

The tensors are CUDA tensors, which FakeTensorMode holds without a GPU.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.operations import ADAMS, CASES, count
from kourkoutas.torch import KourkoutasBeta


@pytest.mark.parametrize("absent", [0, 3], ids=["all gradients", "some gradients"])
@pytest.mark.parametrize("name", CASES)
def test_no_value_is_read_nothing_is_copied_and_no_list_is_uploaded(name, absent):
    found = count(KourkoutasBeta, absent=absent, **CASES[name])
    assert (found.reads, found.copies, found.made_from_lists) == (0, 0, 0)


def test_the_counts_see_what_adam_does():
    plain, capturable = (count(torch.optim.Adam, **options) for options in ADAMS.values())
    assert plain.reads == 64  # the step counts, twice
    assert plain.made_from_lists > 0
    assert (capturable.reads, capturable.made_from_lists) == (0, 0)


def test_a_copy_from_the_cpu_would_be_seen():
    class Uploading(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    torch.empty(5).to(p.device)

    assert count(Uploading, tensors=2).copies == 2


def test_a_default_step_asks_for_fewer_operations_than_adam():
    ours, adam = count(KourkoutasBeta).operations, count(torch.optim.Adam, foreach=True).operations
    assert ours.total() <= 44 < adam.total()
    # Those on the tensors themselves: norm, 10 of the update; the copies are of scalars.
    assert sum(n for name, n in ours.items() if "foreach" in name and "copy" not in name) <= 12


@pytest.mark.parametrize("options", [{}, CASES["full"], {"buckets": "shape"}], ids=["default", "full", "shape"])
def test_the_number_of_operations_does_not_grow_with_the_number_of_tensors(options):
    few, many = (count(KourkoutasBeta, tensors=n, **options).operations for n in (8, 32))
    assert few == many


@pytest.mark.parametrize("capturable", [False, True])
def test_a_route_of_fake_cuda_tensors_is_that_of_a_gpu(capturable):
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.empty(3, device="cuda"))
        p.grad = torch.empty(3, device="cuda")
        (route,) = KourkoutasBeta([p], capturable=capturable).route()
    assert route.name == "foreach"
    assert route.reason == "parameters are on cuda"
