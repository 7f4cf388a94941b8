"""How many operations one step asks torch for on a GPU, counted without one.

    python benchmarks/operations.py

`FakeTensorMode` holds CUDA tensors on any machine, and a dispatch mode inside it sees what a GPU would be asked for:
each operation is a launch or more, `reads` wait for the device, `copies` go between host and device, and `made from
lists` are tensors made of Python numbers, which a CUDA graph cannot capture. Prints the table of benchmarks/README.md.
"""

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kourkoutas.torch import KourkoutasBeta

TENSORS = 32
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "default, `capturable`": {"capturable": True},
    "buckets by module": {"capturable": True, "buckets": "module"},
    "buckets by shape": {"capturable": True, "buckets": "shape"},
    "one bucket": {"capturable": True, "buckets": "global"},
    "`adaptive_tiny`": {"capturable": True, "adaptive_tiny": True},
    '`bias_correction="exact"`': {"capturable": True, "bias_correction": "exact"},
    "`diagnostics`": {"capturable": True, "diagnostics": True},
    '`nonfinite="skip"`': {"capturable": True, "nonfinite": "skip"},
    "full": {"capturable": True, "decay": 0.98, "max_ratio": 3, "adaptive_tiny": True},
}
ADAMS: dict[str, dict[str, Any]] = {
    "Adam foreach": {"foreach": True},
    "Adam foreach, `capturable`": {"foreach": True, "capturable": True},
}


class Counts(NamedTuple):
    """What one step asked for."""

    operations: Counter[str]
    reads: int
    copies: int
    made_from_lists: int


class Count(TorchDispatchMode):
    """Counts the operations under it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.copies = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        if function.namespace == "aten":  # neither questions about a device nor the profiler's marks
            self.seen[function._schema.name.removeprefix("aten::")] += 1
            if "copy" in function._schema.name:
                tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
                self.copies += len({x.device.type for x in tensors}) > 1
        return out


def count(make: Any, tensors: int = TENSORS, absent: int = 0, **options: Any) -> Counts:
    """One step after the first, on fake CUDA tensors; the last `absent` of them have no gradient."""
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(5 + i % 4, 5, device="cuda")) for i in range(tensors)]
        optimizer = make([(f"layer{i // 2}.p{i}", p) for i, p in enumerate(params)], **options)
        for p in params[: tensors - absent]:
            p.grad = torch.empty_like(p)
        optimizer.step()
        with Count() as counted:
            optimizer.step()
    made = counted.seen["lift_fresh"] + counted.seen["lift_fresh_copy"] + counted.seen["lift"]
    return Counts(counted.seen, counted.seen["_local_scalar_dense"], counted.copies, made)


def main() -> None:
    print(f"| one step of {TENSORS} tensors | operations | reads | copies | made from lists |\n|---|---|---|---|---|")
    rows = [(name, KourkoutasBeta, options) for name, options in CASES.items()]
    for name, make, options in (*rows, *((name, torch.optim.Adam, options) for name, options in ADAMS.items())):
        found = count(make, **options)
        who = "" if make is torch.optim.Adam else "K-β, "
        print(
            f"| {who}{name} | {found.operations.total()} | {found.reads} | {found.copies} | {found.made_from_lists} |"
        )


if __name__ == "__main__":
    main()
