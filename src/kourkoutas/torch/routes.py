"""Which way a group's step goes, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.utils._device import DeviceContext

from kourkoutas.torch import kernel

if TYPE_CHECKING:
    from kourkoutas.torch.optimizer import Group


class Route(NamedTuple):
    """The name of a route, and the reason why it was chosen."""

    name: str
    reason: str
    fused: bool = False  # whether the elementwise part of the foreach route is torch's fused Adam kernel


KERNEL = Route("kernel", "the C kernel takes every tensor")
OTHER = Route("foreach", "a tensor is not on the CPU, not plain, or laid out with gaps or unlike its parameter", True)


def choose(own: Group) -> Route:
    """The route of one group as far as its options say: the first line that applies.

    KERNEL holds if the kernel takes every tensor of the step, else OTHER; `fused` if torch's fused Adam kernel does.
    """
    group = own.group
    device = group["params"][0].device.type if group["params"] else "cpu"
    if device != "cpu":
        return Route("foreach", f"parameters are on {device}")
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


_dispatch_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_transform = torch._C._functorch.peek_interpreter_stack


def watched() -> bool:
    """Whether somebody must see every operation: torch.compile, a dispatch or function mode, a functorch transform.

    A default device is a function mode too, but only concerns the making of tensors.
    """
    if torch.compiler.is_compiling() or _dispatch_modes() or _transform() is not None:
        return True
    count = _function_modes()
    return count > 0 and not all(isinstance(torch._C._get_function_stack_at(i), DeviceContext) for i in range(count))
