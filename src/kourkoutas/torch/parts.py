"""Parameters of which only a part lies on this rank, and what must be known of the whole.

| parameter                          | told by                      | its parts lie over                          |
|------------------------------------|------------------------------|---------------------------------------------|
| DTensor (FSDP2, HSDP, TP, 2-D)     | its type                     | the mesh dimensions whose placement shards  |
| FSDP1 with `use_orig_params=True`  | FSDP1's mark on the tensor   | `process_group`                             |
| any other tensor                   |                              | nothing: it is whole                        |
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Part(NamedTuple):
    """What lies on this rank of one parameter."""

    over: tuple[str, ...]  # names of the process groups of more than one rank whose members hold its parts
    size: int  # elements of the whole parameter
    first: int  # number of the first element here, in the order of the whole parameter's memory
    strides: tuple[int, ...] | None  # of the whole; None: elements here are consecutive in the whole


def is_dtensor(x: Tensor) -> bool:
    # Without the module there are no DTensors, and importing it takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_fsdp1(x: Tensor) -> bool:
    return getattr(x, "_fsdp_flattened", False) and not is_dtensor(x)


def whole(p: Tensor) -> Part:
    return Part((), p.numel(), 0, None)


def of_dtensor(p: Any, name: str) -> Part:
    """The part of a DTensor."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    for placement in p.placements:
        if not isinstance(placement, (Replicate, Shard, _StridedShard)):
            raise ValueError(
                f"parameter {name!r} has the placement {placement!r}, which neither shards nor replicates it: "
                "redistribute it to Shard or Replicate before the optimizer is made"
            )
    mesh = p.device_mesh
    over = tuple(
        mesh.get_group(d).group_name
        for d, placement in enumerate(p.placements)
        if mesh.size(d) > 1 and not isinstance(placement, Replicate)
    )
    shape, offset = compute_local_shape_and_global_offset(p.shape, mesh, p.placements)
    strides = tuple(p.stride())
    first = sum(o * s for o, s in zip(offset, strides, strict=True)) if all(shape) else 0
    local = local_tensor(p)
    consecutive = not local.numel() or all(
        n == 1 or a == b for n, a, b in zip(local.shape, local.stride(), strides, strict=True)
    )
    return Part(over, p.numel(), first, None if consecutive else strides)


@torch.no_grad()
def local_tensor(x: Any) -> Any:
    """The plain tensor of a DTensor on this rank; any other tensor as it is."""
    if not is_dtensor(x):
        return x
    local = x.to_local()
    return local.wait() if hasattr(local, "wait") else local


def same_layout(p: Any, x: Any) -> bool:
    """Whether `x` lies on the ranks as `p` does."""
    if not is_dtensor(p):
        return not is_dtensor(x)
    return is_dtensor(x) and bool(x.placements == p.placements and x.device_mesh == p.device_mesh)


@torch.no_grad()
def local_gradient(p: Any, g: Any) -> Any:
    """The gradient's plain tensor on this rank; it is redistributed if it does not lie as its parameter does."""
    if is_dtensor(p) and not same_layout(p, g):
        g = g.redistribute(p.device_mesh, p.placements)
    return local_tensor(g)
