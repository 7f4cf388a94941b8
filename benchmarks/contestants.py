"""What is timed: four models, as lists of tensor shapes, and the optimizers of each framework."""

from __future__ import annotations

from math import prod
from typing import Any

from timing import Contestant, timed

Shape = tuple[int, ...]

FULL: dict[str, Any] = {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}


def _pinn(width: int = 128, hidden: int = 14) -> list[Shape]:
    layers = [(3, width), *[(width, width)] * hidden, (width, 1)]
    return [s for fan_in, fan_out in layers for s in ((fan_out, fan_in), (fan_out,))]


def _char_lm(width: int = 512, layers: int = 6, letters: int = 256, context: int = 512) -> list[Shape]:
    norm: list[Shape] = [(width,), (width,)]
    attention: list[Shape] = [(3 * width, width), (3 * width,), (width, width), (width,)]
    perceptron: list[Shape] = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    block = [*norm, *attention, *norm, *perceptron]
    return [(letters, width), (context, width), *block * layers, *norm, (letters, width), (letters,)]


SHAPES: dict[str, list[Shape]] = {
    "tiny": [(100,)],
    "pinn": _pinn(),
    "charlm": _char_lm(),
    "big": [(4096, 4096)] * 6,
}


def count(name: str) -> int:
    """The number of parameters.

    >>> [count(name) for name in SHAPES]
    [100, 231809, 19439872, 100663296]
    """
    return sum(prod(shape) for shape in SHAPES[name])


def contestants(framework: str, shapes: list[Shape], threads: int, device: str = "cpu") -> dict[str, Contestant]:
    """The optimizers of a framework; `threads` and `device` are PyTorch's, as XLA and MLX make their own choice."""
    if framework == "torch":
        return _of_torch(shapes, threads, device)
    return _of_jax(shapes) if framework == "jax" else _of_mlx(shapes)


def torch_parameters(shapes: list[Shape], device: str = "cpu") -> list[tuple[str, Any]]:
    """Named parameters that have a gradient."""
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = [0.1 * torch.randn(shape, generator=generator) for shape in shapes]
    params = [torch.nn.Parameter(x.to(device)) for x in drawn]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    return [(f"p{i}", p) for i, p in enumerate(params)]


def torch_contestant(optimizer: Any, baseline: str, with_kernel: bool = True) -> Contestant:
    """`optimizer` after its first step; `with_kernel` False keeps the C kernel out of it."""
    import torch

    from kourkoutas.torch import kernel

    on_gpu = optimizer.param_groups[0]["params"][0].is_cuda
    steps = timed(optimizer.step, torch.cuda.synchronize) if on_gpu else timed(optimizer.step)

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        steps(1)
        return int(torch.cuda.max_memory_allocated() - before)

    def without_kernel(k: int) -> float:
        ours, kernel.extension = kernel.extension, None
        elapsed = steps(k)
        kernel.extension = ours
        return elapsed

    run = steps if with_kernel else without_kernel
    run(1)
    state = {id(x): x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)}
    return Contestant(run, baseline, sum(x.nbytes for x in state.values()), peak=peak if on_gpu else None)


def _of_torch(shapes: list[Shape], threads: int, device: str) -> dict[str, Contestant]:
    """Parameters and gradients are shared: what differs is the step."""
    import torch

    from kourkoutas.torch import KourkoutasBeta

    torch.set_num_threads(threads)
    lr = 1e-7  # so small that thousands of steps leave parameters as large as those of a network: see `adaptive_tiny`
    names = torch_parameters(shapes, device)
    params = [p for _, p in names]
    base = "Adam fused"
    out = {
        base: torch_contestant(torch.optim.Adam(params, lr, fused=True), base),
        "Adam foreach": torch_contestant(torch.optim.Adam(params, lr, foreach=True), base),
        "AMSGrad fused": torch_contestant(torch.optim.Adam(params, lr, fused=True, amsgrad=True), base),
    }
    ours = KourkoutasBeta(names, lr)
    if ours.route()[0].name in ("kernel", "triton"):
        out["K-β"] = torch_contestant(ours, base)
        out["K-β full"] = torch_contestant(KourkoutasBeta(names, lr, **FULL), base)
        out["K-β traced"] = torch_contestant(KourkoutasBeta(names, lr, diagnostics=True), "K-β")
    if device == "cpu":
        out["K-β, no kernel"] = torch_contestant(KourkoutasBeta(names, lr), base, with_kernel=False)
    else:
        out["Adam foreach capturable"] = torch_contestant(
            torch.optim.Adam(params, lr, foreach=True, capturable=True), base
        )
        out["K-β, no kernel"] = torch_contestant(KourkoutasBeta(names, lr, foreach=True), base)
    return out


def _of_jax(shapes: list[Shape]) -> dict[str, Contestant]:
    """One jitted update each, buffers donated."""
    import jax
    import jax.numpy as jnp
    import optax

    from kourkoutas.optax import kourkoutas_beta

    grads = {f"p{i}": jnp.full(shape, 1e-3) for i, shape in enumerate(shapes)}

    def contestant(optimizer: Any, baseline: str) -> Contestant:
        def update(params: Any, state: Any, grads: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        def step() -> None:
            held[:] = jitted(*held, grads)

        jitted = jax.jit(update, donate_argnums=(0, 1))
        key = jax.random.key(0)
        params = {name: 0.1 * jax.random.normal(key, g.shape) for name, g in grads.items()}
        held = [params, optimizer.init(params)]
        size = sum(x.nbytes for x in jax.tree.leaves(held[1]))
        step()
        return Contestant(timed(step, lambda: jax.block_until_ready(held)), baseline, size)

    base = "optax.adam"
    return {
        base: contestant(optax.adam(1e-3), base),
        "optax.amsgrad": contestant(optax.amsgrad(1e-3), base),
        "K-β": contestant(kourkoutas_beta(1e-3), base),
        "K-β full": contestant(kourkoutas_beta(1e-3, **FULL), base),
        "K-β traced": contestant(kourkoutas_beta(1e-3, diagnostics=True), "K-β"),
    }


def _of_mlx(shapes: list[Shape]) -> dict[str, Contestant]:
    """Eager and compiled."""
    import mlx.core as mx
    import mlx.optimizers
    from mlx.utils import tree_flatten

    from kourkoutas.mlx import KourkoutasBeta

    grads = {f"p{i}": mx.full(shape, 1e-3) for i, shape in enumerate(shapes)}

    def contestant(optimizer: Any, compiled: bool, baseline: str) -> Contestant:
        def step() -> None:
            held[0] = update(grads, held[0])
            mx.eval(held[0], optimizer.state)

        held = [{name: mx.full(g.shape, 0.1) for name, g in grads.items()}]
        optimizer.init(held[0])
        update = optimizer.apply_gradients
        if compiled:
            update = mx.compile(update, inputs=[optimizer.state], outputs=[optimizer.state])
        step()
        leaves: Any = tree_flatten(optimizer.state)
        return Contestant(timed(step), baseline, sum(x.nbytes for _, x in leaves))

    out = {}
    for mode, compiled in (("eager", False), ("compiled", True)):
        base = f"Adam {mode}"
        out[base] = contestant(mlx.optimizers.Adam(1e-3), compiled, base)
        out[f"K-β {mode}"] = contestant(KourkoutasBeta(1e-3), compiled, base)
        out[f"K-β full {mode}"] = contestant(KourkoutasBeta(1e-3, **FULL), compiled, base)
        out[f"K-β traced {mode}"] = contestant(KourkoutasBeta(1e-3, diagnostics=True), compiled, f"K-β {mode}")
    return out
