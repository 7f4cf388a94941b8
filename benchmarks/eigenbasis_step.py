"""What a step in the eigenbasis costs: ours beside its bare linear algebra, SOAP of a library, and K-β without a basis.

    python benchmarks/eigenbasis_step.py [--framework jax] [--rounds 15] [--models pinn charlm] [--out FILE.json]

A round is two turns of the basis, 20 steps, of each contestant; the order alternates, and the ratios are medians of the
rounds' ratios. "bare" is what cannot be saved: six products of each matrix and gradient a step, and every tenth step a
product and a QR for each side, batched by shape, with nothing else around them. pytorch_optimizer and heavyball take
part where they are installed. In JAX every contestant is one compiled step with donated buffers.

NOTE: JAX takes its QR from SciPy's OpenBLAS, whose threads wait for each other when the machine is busy: set
OPENBLAS_NUM_THREADS=1 there, or the QRs of all contestants take a hundred times as long.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

EVERY, STEPS = 10, 20
Step = Callable[[], object]


def shapes(model: str) -> list[tuple[int, ...]]:
    """The parameters of Testbed B's network, and of the character model of the laptop preset."""
    if model == "pinn":
        matrices = [(128, 3), *[(128, 128)] * 14, (1, 128)]
        return [shape for matrix in matrices for shape in (matrix, (matrix[0],))]
    from kourkoutas.lab import testbeds

    testbed = testbeds.get("char_lm")
    problem = testbed.problem(testbeds.settings_of(testbed, "laptop", {"text": "generated"}), seed=0)
    return [tuple(p.shape) for p in problem.params.values()]


def parameters(model: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes(model)]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


def bare(model: str, limit: int) -> Step:
    """The products and QRs of a step, batched by shape."""
    kinds: dict[tuple[int, ...], int] = {}
    for shape in shapes(model):
        kinds[shape] = kinds.get(shape, 0) + 1
    work = []
    for shape, count in kinds.items():
        if len(shape) != 2:
            continue
        grads = torch.randn(count, *shape)
        sides = []
        for axis, length in enumerate(shape):
            if 1 < length <= limit:
                factor = torch.randn(count, length, length)
                sides.append((axis, torch.linalg.qr(factor).Q, factor @ factor.mT))
        work.append((grads, sides))
    taken = 0

    def along(axis: int, matrix: Tensor, x: Tensor) -> Tensor:
        return matrix @ x if axis == 0 else x @ matrix

    def step() -> None:
        nonlocal taken
        taken += 1
        for grads, sides in work:
            x = grads
            for axis, basis, _ in sides:
                x = along(axis, basis, x)
            for axis, basis, _ in sides:
                x = along(axis, basis, x)
            for axis, basis, factor in sides:
                _ = grads @ grads.mT if axis == 0 else grads.mT @ grads
                if taken % EVERY == 0:
                    torch.linalg.qr(factor @ basis)

    return step


def contestants(model: str, limit: int) -> dict[str, Step]:
    from kourkoutas.torch import KourkoutasBeta

    found = {
        "bare": bare(model, limit),
        "K-β": KourkoutasBeta(parameters(model), lr=1e-3).step,
        "K-β eigen": KourkoutasBeta(parameters(model), lr=1e-3, basis="eigen", basis_limit=limit).step,
    }
    if importlib.util.find_spec("pytorch_optimizer") is not None:
        from pytorch_optimizer import SOAP

        found["pytorch_optimizer.SOAP"] = SOAP(parameters(model), lr=1e-3, max_precondition_dim=limit).step
    if importlib.util.find_spec("heavyball") is not None:
        import heavyball

        found["heavyball.SOAP"] = heavyball.SOAP(parameters(model), lr=1e-3, max_precond_dim=limit).step
    return found


def jax_bare(model: str, limit: int) -> Step:
    """`bare` in JAX: one compiled step, which has the QRs in a branch."""
    import jax
    import jax.numpy as jnp

    rng = np.random.default_rng(0)
    work = []
    for shape in dict.fromkeys(shapes(model)):
        if len(shape) != 2:
            continue
        count = shapes(model).count(shape)
        sides = []
        for axis, length in enumerate(shape):
            if 1 < length <= limit:
                factor = jnp.asarray(rng.normal(size=(count, length, length)), jnp.float32)
                sides.append((axis, jnp.linalg.qr(factor)[0], factor @ factor.mT))
        work.append((jnp.asarray(rng.normal(size=(count, *shape)), jnp.float32), sides))
    axes = [[axis for axis, _, _ in sides] for _, sides in work]
    arrays = [(grads, [(basis, factor) for _, basis, factor in sides]) for grads, sides in work]

    def along(axis: int, matrix: Any, x: Any) -> Any:
        return matrix @ x if axis == 0 else x @ matrix

    @jax.jit
    def step(taken: Any, arrays: Any) -> Any:
        made, last = [], None
        for of_shape, (grads, sides) in zip(axes, arrays, strict=True):
            x = grads
            for axis, (basis, _) in zip(of_shape, sides, strict=True):
                x = along(axis, basis.mT, x)
            for axis, (basis, _) in zip(of_shape, sides, strict=True):
                x = along(axis, basis if axis == 0 else basis.mT, x)
            made.append(x)
            for axis, (basis, factor) in zip(of_shape, sides, strict=True):
                made.append(grads @ grads.mT if axis == 0 else grads.mT @ grads)
                # One QR after the other, for the reason that `kourkoutas.optax.eigenbasis` gives in `_after`.
                factor = factor if last is None else jnp.where(last.ravel()[0] > 2, 0, factor)
                turn = functools.partial(_jax_qr, factor, basis)
                last = jax.lax.cond(taken % EVERY == 0, turn, functools.partial(jnp.zeros_like, basis))
                made.append(last)
        return made

    taken = 0

    def run() -> None:
        nonlocal taken
        taken += 1
        jax.block_until_ready(step(taken, arrays))

    return run


def _jax_qr(factor: Any, basis: Any) -> Any:
    import jax.numpy as jnp

    return jnp.linalg.qr(factor @ basis)[0]


def jax_step(model: str, solver: Any) -> Step:
    """A compiled step of an Optax solver, with donated buffers."""
    import jax
    import jax.numpy as jnp
    import optax

    rng = np.random.default_rng(0)

    def arrays() -> dict[str, Any]:
        return {f"p{i}": jnp.asarray(rng.normal(size=shape), jnp.float32) for i, shape in enumerate(shapes(model))}

    params, grads = arrays(), arrays()
    state = solver.init(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = solver.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def run() -> None:
        nonlocal params, state
        params, state = jax.block_until_ready(step(params, state, grads))

    return run


def jax_contestants(model: str, limit: int) -> dict[str, Step]:
    import optax

    from kourkoutas.optax import in_eigenbasis, kourkoutas_beta

    adam = optax.scale_by_adam(b1=0.95, b2=0.95)
    soap = optax.chain(in_eigenbasis(adam, every=EVERY, limit=limit), optax.scale_by_learning_rate(1e-3))
    return {
        "bare": jax_bare(model, limit),
        "K-β": jax_step(model, kourkoutas_beta(1e-3)),
        "K-β eigen": jax_step(model, kourkoutas_beta(1e-3, basis="eigen", basis_every=EVERY, basis_limit=limit)),
        "Adam in_eigenbasis": jax_step(model, soap),
    }


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds per step of each contestant, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(STEPS):
            step()
    for number in range(rounds):
        order = list(steps) if number % 2 else list(steps)[::-1]
        for name in order:
            start = time.perf_counter()
            for _ in range(STEPS):
                steps[name]()
            seconds[name].append((time.perf_counter() - start) / STEPS)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, baseline: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[baseline], strict=True))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--framework", default="torch", choices=["torch", "jax"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=["pinn", "charlm"], choices=["pinn", "charlm"])
    parser.add_argument("--limit", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    report = {}
    for model in given.models:
        made = contestants if given.framework == "torch" else jax_contestants
        seconds = measure(made(model, given.limit), given.rounds)
        report[model] = {
            name: {
                "ms": 1e3 * statistics.median(times),
                "over bare": ratio(seconds, name, "bare"),
                **({"over " + other: ratio(seconds, name, other) for other in seconds if other.endswith("SOAP")}),
            }
            for name, times in seconds.items()
        }
        threads = f", {torch.get_num_threads()} threads" if given.framework == "torch" else ""
        sys.stdout.write(f"{given.framework} {model}{threads}\n")
        for name, found in report[model].items():
            cells = "  ".join(f"{key} {value:.2f}" for key, value in found.items())
            sys.stdout.write(f"  {name:24} {cells}\n")
    if given.out is not None:
        given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
