"""The gradient of a loss that is written in an engine's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kourkoutas.lab.engines import Engine


def value_and_grad(E: Engine, f: Callable[..., Any]) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """f(params, *rest) → scalar becomes g(params, *rest) → (value, gradients by name), by the engine's framework."""
    if E.name == "jax":
        import jax

        return jax.jit(jax.value_and_grad(f))
    if E.name == "mlx":
        import mlx.core as mx

        return mx.value_and_grad(f)
    import torch

    def both(params: dict[str, Any], *rest: Any) -> tuple[Any, dict[str, Any]]:
        leaves = {name: p.detach().requires_grad_() for name, p in params.items()}
        value = f(leaves, *rest)
        grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
        zeros = (torch.zeros_like(p) if g is None else g for p, g in zip(leaves.values(), grads, strict=True))
        return value.detach(), dict(zip(leaves, zeros, strict=True))

    return both
