"""The PyTorch engine: eager steps, or torch.compile of the loss where a testbed asks for it."""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from kourkoutas.lab.engines import (
    Array,
    Arrays,
    Axis,
    Batches,
    Engine,
    HostLoss,
    Loss,
    Optimizer,
    Params,
    Trainer,
    each_batch,
    training,
)
from kourkoutas.lab.errors import argument
from kourkoutas.trace import Trace


def _tensor(x: Any) -> torch.Tensor:
    """Shares memory with a writable NumPy array; torch would warn about a read-only one, which is copied."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x if x.flags.writeable and x.flags.c_contiguous else np.array(x, order="C"))
    return torch.as_tensor(x)


def _host(x: torch.Tensor) -> NDArray[Any]:
    """A copy on the host; bfloat16, which NumPy does not have, as its bits."""
    x = x.detach().cpu()
    return np.array((x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy())


def _pack(node: Any, path: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """A state dict as plain JSON, its tensors moved to `arrays`; what is neither is left for `_unpack` to keep."""
    if isinstance(node, torch.Tensor):
        arrays[path] = _host(node)
        return {"tensor": path, "dtype": str(node.dtype).removeprefix("torch.")}
    if isinstance(node, Mapping):
        return {"items": [[key, _pack(value, f"{path}/{key}", arrays)] for key, value in node.items()]}
    if isinstance(node, (list, tuple)):
        kind = "tuple" if isinstance(node, tuple) else "list"
        return {kind: [_pack(value, f"{path}/{i}", arrays) for i, value in enumerate(node)]}
    if node is None or isinstance(node, (bool, int, float, str)):
        return {"value": node}
    return {"keep": path}


def _unpack(node: Any, arrays: Mapping[str, NDArray[Any]], current: Any) -> Any:
    if "tensor" in node:
        x = torch.from_numpy(np.array(arrays[node["tensor"]]))
        return x.view(torch.bfloat16) if node["dtype"] == "bfloat16" else x
    if "items" in node:
        now = current if isinstance(current, Mapping) else {}
        return {key: _unpack(value, arrays, now.get(key)) for key, value in node["items"]}
    if "keep" in node:
        return current
    if "value" in node:
        return node["value"]
    kind = "tuple" if "tuple" in node else "list"
    count = len(node[kind])
    old = current if isinstance(current, (list, tuple)) and len(current) == count else [None] * count
    values = [_unpack(value, arrays, c) for value, c in zip(node[kind], old, strict=True)]
    return tuple(values) if kind == "tuple" else values


@functools.lru_cache(maxsize=16)
def _compiled(loss: Loss) -> Callable[..., torch.Tensor]:
    """`loss` through torch.compile, or as it is, with a warning, where there is no compiler."""
    plain = functools.partial(loss, ENGINE)
    if any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "cl") if name):
        return torch.compile(plain, dynamic=False)
    warnings.warn(
        "no C++ compiler found, so torch.compile cannot fuse the steps of this testbed: they take up to twice as long. "
        f"Install g++ or clang++, or use {argument('engine')} jax",
        stacklevel=2,
    )
    return plain


class FromHost(torch.autograd.Function):
    """(loss, constants, parameters) → value, by a function of NumPy arrays that finds the gradient with it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, loss: HostLoss, constants: Sequence[torch.Tensor], *params: torch.Tensor
    ) -> torch.Tensor:
        grads = [torch.empty_like(p) for p in params] if any(ctx.needs_input_grad) else None
        value = loss(
            [x.numpy() for x in constants],
            [p.detach().numpy() for p in params],
            None if grads is None else [g.numpy() for g in grads],
            torch.get_num_threads(),
        )
        ctx.grads = grads
        return torch.tensor(value, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *torch._foreach_mul(ctx.grads, outer[0]))


class _Shifted:
    """A trace for the rows of an optimizer that started to count after `offset` steps.

    NOTE: torch optimizers do not save their ring of rows, so step t of a restored one is step offset + t of the run.
    """

    def __init__(self, trace: Trace, offset: int) -> None:
        self._trace, self._offset = trace, offset

    def pull(self, ring: Any, count: int) -> None:
        self._trace.pull(np.roll(np.asarray(ring), self._offset, axis=0), count + self._offset)


def _asks_for_closure(optimizer: Any) -> bool:
    """Whether `step` cannot be called without one."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class TorchTrainer(Trainer):
    def _begin(self, loss: Loss, params: Arrays, optimizer: Optimizer, constants: Arrays, compile: bool) -> None:
        self._loss = _compiled(loss) if compile else functools.partial(loss, ENGINE)
        self._params = {name: torch.tensor(p).requires_grad_() for name, p in params.items()}
        self._leaves = list(self._params.values())
        self._constants = {name: _tensor(x) for name, x in constants.items()}
        self._optimizer = optimizer.torch(list(self._params.items()), self._trace_every > 0)
        # Finds its own step length, for which it evaluates the loss at several points.
        self._searches = isinstance(self._optimizer, torch.optim.LBFGS)
        self._needs_closure = getattr(self._optimizer, "needs_closure", _asks_for_closure(self._optimizer))
        self._taken = self._offset = 0

    def _bucket_names(self) -> Sequence[str]:
        return cast(Sequence[str], self._optimizer.bucket_names)

    def run(self, batches: Batches, lrs: NDArray[np.float64]) -> NDArray[np.float64]:
        losses: list[torch.Tensor] = []
        training(self._optimizer, True)
        for batch, lr in zip(each_batch(batches, len(lrs), _tensor), lrs, strict=True):
            evaluate = functools.partial(self._evaluate, {**self._constants, **batch})
            for group in self._optimizer.param_groups:
                group["lr"] = 1.0 if self._searches else float(lr)
            if self._needs_closure:
                losses.append(torch.as_tensor(self._optimizer.step(evaluate)))
            else:
                losses.append(evaluate())
                self._optimizer.step()
        training(self._optimizer, False)  # what is evaluated and saved between chunks
        self._taken += len(losses)
        if self.trace is not None:
            self._optimizer.pull(_Shifted(self.trace, self._offset))
        return torch.stack(losses).to(torch.float64).cpu().numpy() if losses else np.zeros(0)

    def _evaluate(self, batch: Params) -> torch.Tensor:
        """The loss, with its gradient left in the parameters."""
        with torch.enable_grad():
            loss = self._loss(self._params, batch)
            grads = torch.autograd.grad(loss, self._leaves, allow_unused=True)
        for p, g in zip(self._leaves, grads, strict=True):
            p.grad = g
        return loss.detach()

    def arrays(self) -> Params:
        return {name: p.detach() for name, p in self._params.items()}

    def params(self) -> dict[str, NDArray[Any]]:
        return {name: np.array(p.detach().cpu().numpy()) for name, p in self._params.items()}

    def state(self) -> dict[str, NDArray[Any]]:
        arrays = {f"params/{name}": _host(p) for name, p in self._params.items()}
        skeleton = json.dumps(_pack(self._optimizer.state_dict(), "optimizer", arrays))
        return {**arrays, "taken": np.array(self._taken), "skeleton": np.frombuffer(skeleton.encode(), np.uint8).copy()}

    def restore(self, state: Arrays) -> None:
        skeleton = json.loads(bytes(np.asarray(state["skeleton"])).decode())
        self._optimizer.load_state_dict(_unpack(skeleton, state, self._optimizer.state_dict()))
        with torch.no_grad():
            for name, p in self._params.items():
                saved = torch.from_numpy(np.array(state[f"params/{name}"]))
                p.copy_(saved.view(torch.bfloat16) if p.dtype == torch.bfloat16 else saved)
        self._taken = self._offset = int(state["taken"])
        self.trace = self._new_trace()


class TorchEngine(Engine):
    name = "torch"
    trainer = TorchTrainer
    array = staticmethod(_tensor)
    sigmoid = staticmethod(torch.sigmoid)
    transpose = staticmethod(torch.permute)
    expand = staticmethod(torch.unsqueeze)

    def numpy(self, x: Array) -> NDArray[Any]:
        x = x.detach().cpu()
        return np.asarray((x.float() if x.dtype == torch.bfloat16 else x).numpy())

    def cast(self, x: Array, dtype: str) -> Array:
        return x.to(getattr(torch, dtype))

    def logaddexp(self, x: Array, y: Array | float) -> Array:
        return torch.logaddexp(x, torch.as_tensor(y, dtype=x.dtype, device=x.device))

    def maximum(self, x: Array, y: Array | float) -> Array:
        return torch.clamp(x, min=y)

    def sum(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return torch.sum(x) if axis is None and not keepdims else torch.sum(x, dim=axis, keepdim=keepdims)

    def mean(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return torch.mean(x) if axis is None and not keepdims else torch.mean(x, dim=axis, keepdim=keepdims)

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return torch.amax(x, dim=() if axis is None else axis, keepdim=keepdims)

    def split(self, x: Array, parts: int, axis: int = -1) -> Sequence[Array]:
        return torch.tensor_split(x, parts, dim=axis)

    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return F.linear(x, w.T, b)

    def silu(self, x: Array) -> Array:
        return F.silu(x)

    def gelu(self, x: Array) -> Array:
        return F.gelu(x, approximate="tanh")

    def softmax(self, x: Array, axis: int = -1) -> Array:
        return torch.softmax(x, dim=axis)

    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
        return F.layer_norm(x, (x.shape[-1],), gain, bias, eps)

    def attention(self, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    def host_loss(self, loss: HostLoss, constants: Sequence[Array], params: Sequence[Array]) -> Array | None:
        on_host = [t.dtype is torch.float32 and t.device.type == "cpu" for t in (*constants, *params)]
        contiguous = [t.is_contiguous() for t in (*constants, *params)]
        return FromHost.apply(loss, constants, *params) if all(on_host) and all(contiguous) else None

    def take(self, table: Array, ids: Array) -> Array:
        return F.embedding(ids if ids.dtype in (torch.int32, torch.int64) else ids.long(), table)

    def cross_entropy(self, logits: Array, ids: Array) -> Array:
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1).long())

    def stop_gradient(self, x: Array) -> Array:
        return x.detach()

    def compile(self, f: Callable[..., Any]) -> Callable[..., Any]:
        return torch.no_grad()(f)


ENGINE = TorchEngine(torch)
