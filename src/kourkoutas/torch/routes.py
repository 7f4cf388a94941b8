"""Which way a group's step goes, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._device import DeviceContext

from kourkoutas.torch.work import Options


class Route(NamedTuple):
    """The name of a route, and the reason why it was chosen."""

    name: str
    reason: str
    on_host: bool = True  # whether scalars may be numbers, if all tensors are on the CPU


TRACED = Route("lists", "the step is being traced by torch.compile, or a torch mode or transform watches it", False)
CAPTURABLE = Route("lists", "capturable=True: scalars stay on the device", False)
TENSORS = Route("lists", "a hyper-parameter is a tensor", False)
ADAM = Route("adam", "β2 is fixed and the extras are off: torch's own Adam")
SPANS = Route("lists", "buckets have members on other ranks of `process_group`", False)
FOREACH = Route("lists", "foreach=True was asked for")
NOT_FUSED = Route("lists", "fused=False was asked for")
KERNEL = Route("kernel", "the C kernel takes every tensor")
EXTRAS = Route("lists", "without the C kernel, max_ratio and state_dtype need operations that torch's Adam lacks")
HOST = Route("host", "plain contiguous CPU tensors, which the C kernel was not there for or did not take")
OTHER = Route(
    "lists", "a tensor is not on the CPU, not plain, not contiguous, or of a dtype that fused kernels do not take"
)


def choose(
    options: Options,
    group: dict[str, Any],
    spans: bool,
    kernel_takes: Callable[[], bool],
    host_takes: Callable[[], bool],
) -> Route:
    """The route of one group that nobody watches (else it is TRACED): the first line that applies.

    Args:
      spans: whether buckets have members on other ranks that this one does not hold.
      kernel_takes: whether the kernel is there and takes every tensor of this step.
      host_takes: whether torch's fused Adam kernel for the CPU takes every tensor of this step.
    """
    hyper = options.hyper
    # fmt: off
    # ruff: noqa: E701
    if group["capturable"]:                                   return CAPTURABLE
    if options.packed is None:                                return TENSORS
    if options.adam:                                          return ADAM
    if spans:                                                 return SPANS
    if group["foreach"]:                                      return FOREACH
    if group["fused"] is False:                               return NOT_FUSED
    if kernel_takes():                                        return KERNEL
    if hyper.max_ratio is not None or group["state_dtype"]:   return EXTRAS
    if host_takes():                                          return HOST
    return OTHER
    # fmt: on


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
