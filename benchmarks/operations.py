"""What one step asks of a GPU, counted without one: launches, reads and copies.

    python benchmarks/operations.py

`FakeTensorMode` holds CUDA tensors on any machine, and a dispatch mode inside it sees what a GPU would be asked for.
`launches` are kernels that the host starts: none for a view or for memory, one for an operation, and for an operation
on lists of tensors one if torch can take them together, else one per tensor. `reads` wait for the device, `copies` go
between host and device, and `made from lists` are tensors made of Python numbers, which a CUDA graph cannot capture.
Prints the tables of benchmarks/README.md.

NOTE: torch cuts what it takes together into launches of at most 30 to 110 tensors, and of 320 pieces of 65,536
elements. Each counts as one here, which flatters operations on lists, Adam's and ours.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kourkoutas.torch import KourkoutasBeta, triton_step

FULL: dict[str, Any] = {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "default, `capturable`": {"capturable": True},
    "buckets by module": {"buckets": "module"},
    "buckets by shape": {"buckets": "shape"},
    "one bucket": {"buckets": "global"},
    "weight decay": {"weight_decay": 0.01},
    "`adaptive_tiny`": {"adaptive_tiny": True},
    '`bias_correction="exact"`': {"bias_correction": "exact"},
    "`diagnostics`": {"diagnostics": True},
    '`nonfinite="skip"`': {"nonfinite": "skip"},
    "full": FULL,
}
ADAMS: dict[str, dict[str, Any]] = {
    "Adam foreach": {"foreach": True},
    "Adam foreach, `capturable`": {"foreach": True, "capturable": True},
    "Adam fused": {"fused": True},
}
ROUTES: dict[str, dict[str, Any]] = {"by Triton": {}, "by torch's operations": {"foreach": True}}
NO_LAUNCH = {"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "lift", "_local_scalar_dense", "detach"}


class Counts(NamedTuple):
    """What one step asked for."""

    operations: Counter[str]
    launches: int
    reads: int
    copies: int
    made_from_lists: int


class Count(TorchDispatchMode):
    """Counts the operations under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.copies = self.launches = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.namespace == "aten":  # neither questions about a device nor the profiler's marks
            name = function._schema.name.removeprefix("aten::")
            self.seen[name] += 1
            self.launches += _launches(function, name, args)
            if "copy" in name:
                tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
                self.copies += len({x.device.type for x in tensors}) > 1
        return out

    def launch(self, name: str, programs: int, *_: Any, **__: Any) -> None:
        """Stands in for the launcher of the Triton kernels."""
        self.seen[f"triton {name}"] += 1
        self.launches += programs > 0


def _launches(function: Any, name: str, args: Any) -> int:
    """How many kernels an operation starts."""
    if name in NO_LAUNCH or function.is_view:
        return 0
    if not name.startswith("_foreach_"):
        return 1
    return 1 if taken_together(name, args) else len(args[0])


def taken_together(name: str, args: Any) -> bool:
    """torch's rule for one launch over lists (`can_use_fast_route` and its callers in ATen/native/cuda/Foreach*.cu).

    Every tensor has the device and dtype of the first and no gaps in memory, and lists agree in sizes and strides,
    tensor by tensor. A list of 0-dim tensors beside a list of others does not. A single tensor has the list's dtype.
    """
    lists = [x for x in args if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
    single = [x for x in args if isinstance(x, Tensor)]
    first = lists[0][0]
    for tensors in lists:
        for x, like in zip(tensors, lists[0], strict=True):
            if x.device != first.device or x.shape != like.shape or x.stride() != like.stride():
                return False
            if not triton_step.is_dense(x) or (x.dtype != first.dtype and name != "_foreach_copy_"):
                return False
    return all(x.dtype == first.dtype and x.numel() == 1 for x in single)


@contextmanager
def with_triton(*, installed: bool = True) -> Iterator[None]:
    """As if Triton were installed, or as if it were not."""
    answer = None if installed else "it is left out of this count"
    with mock.patch.object(triton_step, "missing", return_value=answer):
        yield


def count(make: Callable[..., Any], tensors: int = 32, absent: int = 0, **options: Any) -> Counts:
    """One step after the first, on fake CUDA tensors; the last `absent` of them have no gradient."""
    with FakeTensorMode(), with_triton():
        params = [torch.nn.Parameter(torch.empty(5 + i % 4, 5, device="cuda")) for i in range(tensors)]
        optimizer = make([(f"layer{i // 2}.p{i}", p) for i, p in enumerate(params)], **options)
        for p in params[: tensors - absent]:
            p.grad = torch.empty_like(p)
        optimizer.step()
        with Count() as counted, mock.patch.object(triton_step, "launch", counted.launch):
            optimizer.step()
    made = counted.seen["lift_fresh"] + counted.seen["lift_fresh_copy"] + counted.seen["lift"]
    reads = counted.seen["_local_scalar_dense"]
    return Counts(counted.seen, counted.launches, reads, counted.copies, made)


def rows() -> Iterator[tuple[str, Callable[..., Any], dict[str, Any]]]:
    """What is counted: a name, the optimizer and its options."""
    for route, ways in ROUTES.items():
        for name, options in CASES.items():
            yield f"K-β {route}, {name}", KourkoutasBeta, {**options, **ways}
    for name, options in ADAMS.items():
        yield name, torch.optim.Adam, options


def main() -> None:
    print(f"torch {re.sub('[+].*', '', torch.__version__)}\n")
    print("| one step | launches, 8 tensors | 64 tensors | reads, 64 tensors | copies | made from lists |")
    print("|---|---|---|---|---|---|")
    for name, make, options in rows():
        few, many = (count(make, tensors, **options) for tensors in (8, 64))
        print(f"| {name} | {few.launches} | {many.launches} | {many.reads} | {many.copies} | {many.made_from_lists} |")


if __name__ == "__main__":
    main()
