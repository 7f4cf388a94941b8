"""Which way a group's step goes, and why.

A further kind of step needs three things: a class that is a `Step`, a line in `choose`, and a line in `gather`.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from kourkoutas.rule import Hyper
from kourkoutas.torch import kernel, private, triton_step
from kourkoutas.torch.eigenbasis import EigenStep
from kourkoutas.torch.eigenbasis_kernel import EigenKernelStep
from kourkoutas.torch.group import Group
from kourkoutas.torch.lists import FusedStep, ListStep
from kourkoutas.torch.recorder import Row
from kourkoutas.torch.triton_step import TritonStep


class Step(Protocol):
    """One group's step with all tensors at hand, after every check; the optimizer calls these in this order.

    Where tensors or buckets lie on several ranks, `sharding.Pool` also calls `sums`, `latest` and `take` of `ListStep`,
    between `measure` and `first_bad`; the steps of such groups are made of that class.
    """

    hyper: Hyper

    def measure(self) -> None:
        """Sum what must be known of the gradients before anything moves."""

    def first_bad(self) -> str | None:
        """The name of the first bucket whose norm is not finite; asked for with nonfinite="raise" only."""

    def apply(self, row: Row | None = None) -> None:
        """Move the scalars and the tensors; write sun, β2 and n of the buckets into the row of the trace, if any."""


class Route(NamedTuple):
    """The name of a route, and the reason why it was chosen."""

    name: str
    reason: str
    fused: bool = False  # whether the elementwise part of the foreach route is torch's fused Adam kernel


KERNEL = Route("kernel", "the C kernel takes every tensor")
EIGEN = Route("eigenbasis", "basis='eigen' was asked for")
EIGEN_BY_KERNEL = Route("eigenbasis", "basis='eigen' was asked for; the C kernel moves m and v")
TRITON = Route("triton", "the Triton kernels take every tensor")
OTHER = Route("foreach", "a tensor is not on the CPU, not plain, or laid out with gaps or unlike its parameter", True)
OTHER_ON_GPU = Route(
    "foreach",
    "a tensor is not plain, on another device, or laid out with gaps or unlike its parameter; or a CUDA graph is "
    "captured before a first step",
)


def choose(own: Group) -> Route:
    """The route of one group as far as its options say.

    KERNEL holds if the kernel takes every tensor of the step, else OTHER; `fused` if torch's fused Adam kernel does.
    TRITON holds if its kernels take every tensor, else OTHER_ON_GPU; EIGEN_BY_KERNEL if the kernel does, else EIGEN.
    """
    route = _choose_without_basis(own)
    if own.hyper.basis is None:
        return route
    return EIGEN_BY_KERNEL if route is KERNEL else EIGEN


def _choose_without_basis(own: Group) -> Route:
    """The first line that applies."""
    group = own.group
    device = group["params"][0].device.type if group["params"] else "cpu"
    if device != "cpu":
        return _choose_on_accelerator(own)
    if not private.knows_modes:
        return Route(
            "foreach", "this torch does not say whether a mode watches the step; a new torch may have renamed it"
        )
    if watched():
        return Route("foreach", "the step is being traced by torch.compile, or a torch mode or transform watches it")
    if group["capturable"]:
        return Route("foreach", "capturable=True: scalars stay on the device")
    if own.packed is None:
        return Route("foreach", "a hyper-parameter is a tensor")
    if group["foreach"]:
        return Route("foreach", "foreach=True was asked for")
    if group["fused"] is False:
        return Route("foreach", "fused=False was asked for")
    if own.shards is not None:
        return Route("foreach", "parameters or members of their buckets lie on several ranks", fused=True)
    if kernel.extension is None:
        return Route("foreach", f"the C kernel is not there: {kernel.missing}", fused=True)
    return KERNEL


def _choose_on_accelerator(own: Group) -> Route:
    """The same for parameters that are not on the CPU. Fake tensors go as real ones would that nobody watches."""
    group, device = own.group, own.group["params"][0].device
    fake = private.is_fake(group["params"][0])
    if device.type not in triton_step.DEVICES:
        return Route("foreach", f"parameters are on {device.type}")
    if torch.compiler.is_compiling() or (not fake and (not private.knows_modes or watched())):
        return Route("foreach", f"parameters are on {device.type}, and torch.compile, a mode or a transform may watch")
    if group["foreach"]:
        return Route("foreach", "foreach=True was asked for")
    if group["fused"] is False:
        return Route("foreach", "fused=False was asked for")
    missing = triton_step.missing(None if fake else device)
    if missing is not None:
        return Route("foreach", f"parameters are on {device.type}, and Triton cannot be used: {missing}")
    return TRITON


def gather(own: Group, state: Any) -> tuple[Route, Step]:
    """The route of one group, and its step with all tensors at hand; every check is made here."""
    route = choose(own)
    if route is KERNEL:
        step = kernel.gather(own, state)
        if step is not None:
            return route, step
    collected = own.collect(state)  # which makes the state that the kernel may have missed
    if route is KERNEL:
        step = kernel.gather(own, state)
        if step is not None:
            return route, step
        route = OTHER
    if route is EIGEN_BY_KERNEL:
        by_kernel = EigenKernelStep.gathered(own, collected, state)
        if by_kernel.takes(state):
            return route, by_kernel
        route = EIGEN
    if route is EIGEN:
        return route, EigenStep.gathered(own, collected, state)
    if route is TRITON:
        on_gpu = TritonStep(own, collected)
        if on_gpu.takes():
            return route, on_gpu
        route = OTHER_ON_GPU
    if route.fused:
        fused = FusedStep(own, collected)
        if fused.takes():
            return route, fused
    plain = ListStep(own, collected)
    plain.check()
    return route._replace(fused=False), plain


def watched() -> bool:
    """Whether somebody must see every operation: torch.compile, a dispatch or function mode, a functorch transform.

    A default device is a function mode too, but only concerns the making of tensors.
    """
    if torch.compiler.is_compiling() or private.count_dispatch_modes() or private.functorch_level() is not None:
        return True
    return not all(private.only_a_default_device(mode) for mode in range(private.count_function_modes()))
