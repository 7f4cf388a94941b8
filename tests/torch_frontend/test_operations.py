"""What a step asks of a GPU: launches, and values read, copied or uploaded, for which a CUDA graph cannot be captured.

The tensors are CUDA tensors, which FakeTensorMode holds without a GPU.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.operations import ADAMS, CASES, FULL, ROUTES, count, with_triton
from kourkoutas.torch import KourkoutasBeta

BOUNDED = ["default", "full", '`bias_correction="exact"`', "buckets by module", "weight decay"]
FOREACH = {"foreach": True}


@pytest.mark.parametrize("absent", [0, 3], ids=["all gradients", "some gradients"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES)
def test_no_value_is_read_nothing_is_copied_and_no_list_is_uploaded(route, name, absent):
    found = count(KourkoutasBeta, absent=absent, **route, **CASES[name])
    assert (found.reads, found.copies, found.made_from_lists) == (0, 0, 0)


def test_the_counts_see_what_adam_does():
    plain, capturable, fused = (count(torch.optim.Adam, **options) for options in ADAMS.values())
    assert plain.reads == 64  # the step counts, twice
    assert plain.made_from_lists > 0
    assert (capturable.reads, capturable.made_from_lists) == (0, 0)
    assert (plain.launches, fused.launches) == (8, 2)
    assert capturable.launches == 15 + 2 * 32  # two operations take a list of 0-dim tensors


def test_a_copy_from_the_cpu_would_be_seen():
    class Uploading(torch.optim.SGD):
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    torch.empty(5).to(p.device)

    assert count(Uploading, tensors=2).copies == 2


def test_a_list_of_0_dim_tensors_is_a_launch_for_each():
    class Scaling(torch.optim.SGD):
        def step(self):
            (group,) = self.param_groups
            params = [p.detach() for p in group["params"]]
            torch._foreach_mul_(params, 2.0)
            torch._foreach_mul_(params, [torch.empty((), device="cuda") for _ in params])

    assert count(Scaling, tensors=5).launches == 1 + 5


@pytest.mark.parametrize("name", BOUNDED)
def test_the_triton_route_takes_as_many_launches_for_8_tensors_as_for_64(name):
    few, many = (count(KourkoutasBeta, tensors=n, **CASES[name]) for n in (8, 64))
    assert few.operations == many.operations
    assert few.launches == many.launches <= 60


@pytest.mark.parametrize("name", CASES)
def test_no_option_makes_launches_of_the_triton_route_grow(name):
    few, many = (count(KourkoutasBeta, tensors=n, **CASES[name]).launches for n in (8, 64))
    assert few == many <= 60


@pytest.mark.parametrize("tensors", [8, 64])
@pytest.mark.parametrize("name", BOUNDED)
def test_torchs_operations_take_at_most_two_launches_per_tensor_and_35(name, tensors):
    assert count(KourkoutasBeta, tensors, **CASES[name], **FOREACH).launches <= 35 + 2 * tensors


def test_a_default_step_by_torchs_operations_takes_fewer_launches_than_adams_capturable_one():
    adam = count(torch.optim.Adam, 64, foreach=True, capturable=True)
    assert count(KourkoutasBeta, 64, **FOREACH).launches < adam.launches


@pytest.mark.parametrize("options", [{}, FULL, {"buckets": "shape"}], ids=["default", "full", "shape"])
def test_the_number_of_operations_does_not_grow_with_the_number_of_tensors(options):
    few, many = (count(KourkoutasBeta, tensors=n, **FOREACH, **options).operations for n in (8, 32))
    assert few == many


def route_of_fake_tensors(device="cuda", **options):
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.empty(3, device=device))
        p.grad = torch.empty(3, device=device)
        (route,) = KourkoutasBeta([p], **options).route()
    return route


@pytest.mark.parametrize("capturable", [False, True])
def test_a_route_of_fake_cuda_tensors_is_that_of_a_gpu(capturable):
    with with_triton():
        assert route_of_fake_tensors(capturable=capturable).name == "triton"
    with with_triton(installed=False):
        route = route_of_fake_tensors(capturable=capturable)
    assert route.name == "foreach"
    assert route.reason.startswith("parameters are on cuda, and Triton cannot be used: ")


@pytest.mark.parametrize(
    ("device", "options", "reason"),
    [
        ("cuda", {"foreach": True}, "foreach=True was asked for"),
        ("cuda", {"fused": False}, "fused=False was asked for"),
        ("xpu", {}, "parameters are on xpu"),
    ],
)
def test_a_route_on_an_accelerator_says_why_it_is_not_tritons(device, options, reason):
    with with_triton():
        route = route_of_fake_tensors(device, **options)
    assert (route.name, route.reason) == ("foreach", reason)
