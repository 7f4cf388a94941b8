"""What one step asks of a GPU, counted without one: launches, reads and copies.

    python benchmarks/operations.py

`FakeTensorMode` holds CUDA tensors on any machine, and a dispatch mode inside it sees what a GPU would be asked for.
`launches` are kernels that the host starts: none for a view or for memory, one for an operation, and for an operation
on lists of tensors one if torch can take them together, else one per tensor. `reads` wait for the device, `copies` go
between host and device, and `made from lists` are tensors made of Python numbers, which a CUDA graph cannot capture.
For JAX and MLX the kernels are counted that their compilers make of one step. Prints the table of
benchmarks/README.md.

NOTE: torch cuts what it takes together into launches of at most 30 to 110 tensors, and of 320 pieces of 65,536
elements. Each counts as one here, which flatters operations on lists, Adam's and ours.

NOTE: the compilers are those for the CPU. XLA for GPUs fuses by other rules.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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
        named = {name: torch.nn.Parameter(torch.empty(shape, device="cuda")) for name, shape in shapes(tensors).items()}
        params = list(named.values())
        optimizer = make(list(named.items()), **options)
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


def shapes(tensors: int) -> dict[str, tuple[int, int]]:
    """Names and shapes of so many tensors, four different ones, two to a module."""
    return {f"layer{i // 2}.p{i}": (5 + i % 4, 5) for i in range(tensors)}


def jax_kernels(optimizer: Any, tensors: int) -> int:
    """What XLA starts for one step: instructions of the entry computation that do something."""
    import jax
    import jax.numpy as jnp
    import optax

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = {name: jnp.ones(shape) for name, shape in shapes(tensors).items()}
    step = jax.jit(update, donate_argnums=(0, 1))
    text = step.lower(params, optimizer.init(params), params).compile().as_text()
    entry = text[text.index("\nENTRY") :]
    found = re.findall(r"^\s+(?:ROOT )?%\S+ = .*?\s([a-z][a-z-]*)\(", entry, re.MULTILINE)
    return sum(name not in ("parameter", "constant", "tuple", "get-tuple-element", "bitcast") for name in found)


MLX_VIEWS = ("Reshape", "AsStrided", "Squeeze", "Depends", "Broadcast", "ExpandDims", "Slice", "Split", "Flatten")


def mlx_kernels(optimizer: Any, tensors: int) -> int:
    """What MLX starts for one step under mx.compile: nodes of its graph that do something, `Concatenate` per input."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    params = {name: mx.ones(shape) for name, shape in shapes(tensors).items()}
    grads = {name: mx.ones(shape) for name, shape in shapes(tensors).items()}
    optimizer.init(params)
    step = mx.compile(optimizer.apply_gradients, inputs=[optimizer.state], outputs=[optimizer.state])
    params = step(grads, params)
    mx.eval(params, optimizer.state)
    leaves: Any = tree_flatten([step(grads, params), optimizer.state])
    with tempfile.NamedTemporaryFile(suffix=".dot") as file:
        mx.export_to_dot(file.name, *(x for _, x in leaves if isinstance(x, mx.array)))
        text = Path(file.name).read_text()
    nodes = dict(re.findall(r'(\d+) \[label ="(\w+)", shape=rectangle', text))
    inputs = Counter(re.findall(r"-> (\d+)", text))
    return sum(inputs[node] if name == "Concatenate" else name not in MLX_VIEWS for node, name in nodes.items())


def compiled_rows() -> Iterator[tuple[str, Callable[[int], int]]]:
    """What is counted of JAX and MLX: a name, and the count for a number of tensors."""
    import mlx.optimizers
    import optax

    from kourkoutas.mlx import KourkoutasBeta as ForMlx
    from kourkoutas.optax import kourkoutas_beta

    yield "JAX, optax.adam", lambda tensors: jax_kernels(optax.adam(1e-3), tensors)
    yield "JAX, K-β, default", lambda tensors: jax_kernels(kourkoutas_beta(1e-3), tensors)
    yield "JAX, K-β, full", lambda tensors: jax_kernels(kourkoutas_beta(1e-3, **FULL), tensors)
    yield "MLX compiled, Adam", lambda tensors: mlx_kernels(mlx.optimizers.Adam(1e-3), tensors)
    yield "MLX compiled, K-β, default", lambda tensors: mlx_kernels(ForMlx(1e-3), tensors)
    yield "MLX compiled, K-β, full", lambda tensors: mlx_kernels(ForMlx(1e-3, **FULL), tensors)


def main() -> None:
    print("| one step | launches, 8 tensors | 64 tensors | reads, 64 tensors | copies | made from lists |")
    print("|---|---|---|---|---|---|")
    for name, make, options in rows():
        few, many = (count(make, tensors, **options) for tensors in (8, 64))
        print(f"| {name} | {few.launches} | {many.launches} | {many.reads} | {many.copies} | {many.made_from_lists} |")
    for name, kernels in compiled_rows():
        print(f"| {name} | {kernels(8)} | {kernels(64)} | | | |")


if __name__ == "__main__":
    main()
