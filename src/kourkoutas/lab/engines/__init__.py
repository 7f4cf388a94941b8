"""Engines: one small vocabulary of array, autodiff and training calls on PyTorch, JAX and MLX.

A testbed is written once, as plain functions of an `Engine` (called `E` there) and arrays, and never imports a
framework. Besides the calls below it may use what all three kinds of arrays share: arithmetic and comparison
operators, `@`, basic indexing and slicing, `.shape`, `.ndim` and `.reshape(*shape)`.

An engine may implement a call with a fused operation of its framework; the maths in the docstring stays the contract.

NOTE: parameters are flat dicts "name.with.dots" → array, made in NumPy from the seed, so every engine starts from the
same numbers. Arrays keep the dtype of the NumPy array they are made from.
"""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.errors import argument, unknown
from kourkoutas.trace import Trace

Array = Any
Params = dict[str, Array]
Batch = dict[str, Array]
Loss = Callable[["Engine", Params, Batch], Array]
Arrays = Mapping[str, NDArray[Any]]
Batches = Arrays | Sequence[Arrays]
Axis = int | tuple[int, ...] | None
HostArrays = Sequence[NDArray[Any]]
HostLoss = Callable[[HostArrays, HostArrays, HostArrays | None, int], float]

NAMES = ("torch", "jax", "mlx")


class Optimizer(Protocol):
    """What a trainer needs to know of an optimizer: how to build it, and what it records.

    Attributes:
      recorded: whether it keeps sun and β2 of every step (K-β).
      buckets: how it groups parameters, of a recorded one.
      step: the same optimizer without its name and learning rate. Hashable: a compiled step is kept under it.
    """

    @property
    def recorded(self) -> bool: ...
    @property
    def buckets(self) -> Any: ...
    @property
    def step(self) -> Optimizer: ...
    def __hash__(self) -> int: ...

    def torch(self, named: Sequence[tuple[str, Any]], diagnostics: bool) -> Any:
        """A torch optimizer of named leaf tensors; its learning rate is set per step through its param groups."""
        ...

    def optax(self, diagnostics: bool) -> Callable[[Any], Any]:
        """A function from the learning rate of a step, maybe traced, to the gradient transformation of that step."""
        ...

    def mlx(self, diagnostics: bool) -> Any:
        """An MLX optimizer; its learning rate is set per step through `learning_rate`."""
        ...


class Trainer(ABC):
    """One optimization under way on one engine: parameters, optimizer state and a compiled step.

    Args:
      loss: function (E, params, batch) → scalar.
      params: where it starts.
      constants: arrays that are part of every batch, moved to the device once.
      trace_every: k records sun and β2 of every k-th step of K-β in `trace`; call `run` with at most
        `kourkoutas.trace.WINDOW` steps then. 0 records nothing.
      compile: asks PyTorch for torch.compile of the loss and its gradient; JAX and MLX always compile their step.

    NOTE: compiled steps are kept per process under (loss, optimizer). A `loss` that is a module-level function, or a
    frozen dataclass with `__call__`, is compiled once for all seeds; a bound method or lambda once per run.
    """

    trace: Trace | None

    def __init__(
        self,
        loss: Loss,
        params: Arrays,
        optimizer: Optimizer,
        *,
        constants: Arrays | None = None,
        trace_every: int = 0,
        compile: bool = False,
    ) -> None:
        self._trace_every = trace_every if optimizer.recorded else 0
        self._begin(loss, params, optimizer, constants or {}, compile)
        self.trace = self._new_trace()

    def _new_trace(self) -> Trace | None:
        if not self._trace_every:
            return None
        return Trace(self._bucket_names(), every=self._trace_every)

    @abstractmethod
    def _begin(self, loss: Loss, params: Arrays, optimizer: Optimizer, constants: Arrays, compile: bool) -> None:
        """Move everything to the device and build the step."""

    @abstractmethod
    def _bucket_names(self) -> Sequence[str]: ...

    @abstractmethod
    def run(self, batches: Batches, lrs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Take one step per entry of `lrs` and return the loss of each step, before its update.

        `batches` is either one mapping of stacked arrays, whose first axis counts the steps (empty when the problem
        has only constants), or a sequence with one mapping per step, whose shapes may differ from step to step.
        """

    @abstractmethod
    def arrays(self) -> Params:
        """The current parameters as the engine's arrays, for evaluation; valid until the next `run`."""

    def params(self) -> dict[str, NDArray[Any]]:
        """A copy of the current parameters."""
        return {name: np.array(x) for name, x in self.arrays().items()}

    @abstractmethod
    def state(self) -> dict[str, NDArray[Any]]:
        """Parameters and optimizer state as one flat dict of arrays; `restore` of it continues bit for bit."""

    @abstractmethod
    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Take over what `state` returned, in this or another process.

        `trace` starts afresh; it may repeat rows from before the restored step, under the same step numbers.
        """


def each_batch(batches: Batches, steps: int, array: Callable[[Any], Array]) -> Iterator[Batch]:
    """The batch of each step, as the engine's arrays."""
    if isinstance(batches, Mapping):
        stacked = {name: array(x) for name, x in batches.items()}
        return ({name: x[i] for name, x in stacked.items()} for i in range(steps))
    return ({name: array(x) for name, x in batch.items()} for batch in batches)


# Call of the vocabulary → function of a namespace that follows NumPy.
ALIKE = {
    **{name: name for name in ("abs", "clip", "einsum", "logaddexp", "max", "maximum", "mean", "round", "sqrt")},
    **{name: name for name in ("square", "sum", "tanh", "transpose", "where")},
    "concat": "concatenate",
    "expand": "expand_dims",
    "broadcast": "broadcast_to",
}


class Engine:
    """The vocabulary, in a namespace `xp` that follows NumPy; a framework's engine has what it names or does otherwise.

    `axis` counts as in NumPy; results keep the dtype of their inputs. With the signatures of NumPy: abs, clip, einsum,
    logaddexp, max, maximum, mean, round (its gradient is zero), sqrt, square, sum, tanh, transpose, where, `concat` of
    concatenate, `expand` of expand_dims, `broadcast` of broadcast_to. The second of logaddexp and maximum, and the last
    two of where, may be numbers.
    """

    name: str
    trainer: type[Trainer]

    sigmoid: Callable[[Array], Array]
    softmax: Callable[..., Array]
    layer_norm: Callable[..., Array]
    """gain·(x - ⟨x⟩)/√(var x + eps) + bias over the last axis, with the biased variance: (x, gain, bias, eps=1e-5)."""
    cross_entropy: Callable[[Array, Array], Array]
    """⟨-log softmax(logits)[ids]⟩ over all leading axes, in nats."""
    stop_gradient: Callable[[Array], Array]
    compile: Callable[[Callable[..., Any]], Callable[..., Any]]
    """f of arrays and dicts of arrays, compiled where the framework gains from it; used without gradients."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        for name, function in ALIKE.items():
            if not hasattr(self, name):
                setattr(self, name, getattr(xp, function))

    if TYPE_CHECKING:  # those of `ALIKE`

        def __getattr__(self, name: str) -> Callable[..., Array]: ...

    def array(self, x: Any) -> Array:
        """NumPy array (or nested numbers) → engine array of the same dtype; Python floats become float32."""
        return self.xp.asarray(x)

    def numpy(self, x: Array) -> NDArray[Any]:
        """Engine array → NumPy array, detached, on the host."""
        return np.asarray(x)

    def cast(self, x: Array, dtype: str) -> Array:
        """To "float32", "float64", "bfloat16", "float16", "int32", "int64", "uint8" or "bool"."""
        return x.astype(dtype)

    def arange(self, n: int) -> Array:
        """0, …, n-1 as int32."""
        return self.xp.arange(n, dtype=self.xp.int32)

    def split(self, x: Array, parts: int, axis: int = -1) -> Sequence[Array]:
        """`parts` equal pieces along `axis`."""
        return cast(Sequence[Array], self.xp.split(x, parts, axis=axis))

    def take(self, table: Array, ids: Array) -> Array:
        """Rows of `table` (an embedding) at integer `ids`: shape ids.shape + (columns,)."""
        return self.xp.take(table, ids, axis=0)

    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        """x·w + b with w of shape (inputs, outputs); x may have leading axes."""
        return x @ w if b is None else x @ w + b

    def silu(self, x: Array) -> Array:
        """x·σ(x)."""
        return x * self.sigmoid(x)

    def gelu(self, x: Array) -> Array:
        """½x(1 + tanh(√(2/π)(x + 0.044715x³))), the tanh form."""
        return 0.5 * x * (1 + self.xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    def attention(self, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        """softmax(q·kᵀ/√d)·v for q (…, heads, queries, d) and k, v (…, heads, keys, d).

        `mask` is boolean, broadcastable to (…, queries, keys), True where a query may look; by default query i looks
        at keys 0…i.
        """
        allowed = self.xp.tri(q.shape[-2], k.shape[-2]) > 0 if mask is None else mask
        scores = (q @ self.xp.swapaxes(k, -1, -2)) * (1 / math.sqrt(q.shape[-1]))
        return self.softmax(self.xp.where(allowed, scores, -math.inf)) @ v

    def recompute(self, f: Callable[..., Array], *arrays: Array) -> Array:
        """f(*arrays), whose backward pass may work everything out again from the arrays instead of keeping it."""
        return f(*arrays)

    def host_loss(self, loss: HostLoss, constants: Sequence[Array], params: Sequence[Array]) -> Array | None:
        """A scalar that `loss` computes on the host with its gradient; None where the engine's arrays are no float32
        arrays of the host.

        Args:
          loss: function (constants, params, gradients, threads) → value of NumPy arrays; it fills the arrays
            `gradients`, or leaves the gradient out where that is None.
          constants: arrays that the scalar is not differentiated by.
          params: arrays that it is differentiated by.
        """
        return None

    def bce_with_logits(self, logits: Array, y: Array) -> Array:
        """⟨log(1 + exp z) - y·z⟩."""
        return self.xp.mean(self.logaddexp(logits, 0.0) - y * logits)


def training(optimizer: Any, on: bool) -> None:
    """Tell an optimizer that keeps an average of the parameters, as schedule-free ones do, which of the two to show."""
    switch = getattr(optimizer, "train" if on else "eval", None)
    if callable(switch):
        switch()


def check(name: str) -> None:
    """Raise unless there is such an engine and its framework is installed; imports nothing."""
    if name not in NAMES:
        raise unknown("engine", name, NAMES)
    for package in ("jax", "optax") if name == "jax" else (name,):
        if importlib.util.find_spec(package) is None:
            raise ImportError(
                f"{argument('engine')} {name} needs {package}, which is not installed: pip install "
                f"'kourkoutas-beta[{name}]'"
            )


def get(name: str) -> Engine:
    """The engine of that name: "torch", "jax" or "mlx"."""
    check(name)
    engine: Engine = importlib.import_module(f"kourkoutas.lab.engines.{name}").ENGINE
    return engine
