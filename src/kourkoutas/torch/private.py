"""Every private name of torch that this package uses, and, beside each, what happens where a torch has lost it.

`torch._foreach_*` is not here: torch's own optimizers are made of it. kernel.py asks for
`Tensor.__dlpack_c_exchange_api__`, which DLPack specifies; without it there is no C kernel.

NOTE: names of torch.distributed are looked up when a tensor needs them, as importing its modules takes long.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor


def _find(path: str) -> Any:
    """What stands at a dotted path below `torch`, or None."""
    found: Any = torch
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


# How many dispatch modes, function modes and functorch transforms watch. Without one of them a step cannot know whether
# somebody must see it: it goes by torch's operations, which everybody sees, and `route()` says why.
count_dispatch_modes: Any = _find("_C._len_torch_dispatch_stack")
count_function_modes: Any = _find("_C._len_torch_function_stack")
functorch_level: Any = _find("_C._functorch.peek_interpreter_stack")
knows_modes = None not in (count_dispatch_modes, count_function_modes, functorch_level)

# A function mode, by its number. Without it, or without DeviceContext, a default device counts as a mode that watches.
function_mode: Any = _find("_C._get_function_stack_at")
try:
    from torch.utils._device import DeviceContext
except ImportError:
    DeviceContext = None  # type: ignore[assignment, misc]

# Adam's update of one tensor. Without it, and without the C kernel, the update is made of several operations.
fused_adamw: Any = _find("_fused_adamw_")

# The path of torch's own library, which has LAPACK behind it. Without it the eigenbasis turns by `torch.linalg.qr`.
library: str = getattr(_find("_C"), "__file__", None) or ""


def only_a_default_device(mode: int) -> bool:
    """Whether a function mode, given by its number on the stack, does no more than choose a device for new tensors."""
    if function_mode is None or DeviceContext is None:
        return False
    return isinstance(function_mode(mode), DeviceContext)


def all_reduce(x: Tensor, how: str, name: str, process_groups: dict[str, Any]) -> Tensor:
    """The sum ("sum") or maximum ("max") of `x` over the ranks of one of the process groups; `x` stays as it is.

    Without `_functional_collectives`, which torch.compile can trace, `torch.distributed.all_reduce`, which it cannot.
    """
    try:
        from torch.distributed._functional_collectives import all_reduce as traced
        from torch.distributed._functional_collectives import wait_tensor
    except ImportError:
        out = x.clone()
        operations = {"sum": torch.distributed.ReduceOp.SUM, "max": torch.distributed.ReduceOp.MAX}
        torch.distributed.all_reduce(out, operations[how], group=process_groups[name])
        return out
    return wait_tensor(traced(x, how, name))  # type: ignore[no-any-return, arg-type]


def devices_of(process_group: Any) -> list[str]:
    """The kinds of device on which a process group communicates.

    Without `_device_types` none, and parameters that were offloaded to the CPU are summed there.
    """
    return [device.type for device in getattr(process_group, "_device_types", ())]


def offset_of_shard(x: Any) -> tuple[int, ...] | None:
    """Where the part of a DTensor that lies here begins in the whole one.

    Without `compute_local_shape_and_global_offset` None, and stochastic rounding is refused for shards.
    """
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:
        return None
    _, offset = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(offset)


def sharding_placements() -> tuple[type, ...]:
    """The placements that cut a tensor into parts.

    Without `_StridedShard`, the placement of FSDP2 over tensor parallelism, that one is refused as unknown.
    """
    from torch.distributed.tensor import Shard

    try:
        from torch.distributed.tensor.placement_types import _StridedShard
    except ImportError:
        return (Shard,)
    return Shard, _StridedShard


def left_by_fsdp1(x: Tensor) -> bool:
    """Whether FSDP1 marked this tensor as the flat part of a parameter.

    Without the mark it would be taken for a whole tensor: tests/torch_sharded/test_process_group.py would fail.
    """
    return getattr(x, "_fsdp_flattened", False)


def is_fake(x: Tensor) -> bool:
    """Whether a tensor is one of FakeTensorMode's, which has no memory.

    Without `FakeTensor` none is taken for one, and a fake CUDA tensor goes by torch's operations, as a subclass does.
    """
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(x, getattr(module, "FakeTensor", ()))
