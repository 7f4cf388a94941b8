"""Time of one Heat3D loss and gradient, as ratios inside one run.

| row           | what is timed                                                                                        |
|---------------|------------------------------------------------------------------------------------------------------|
| bare          | the matrix products of the Taylor loss, forward and backward, with the same shapes and nothing else |
| torch-native  | the torch engine as runs use it: the C kernel                                                        |
| torch-fused   | the same where the kernel was not built: hand-written layers, elementwise parts compiled             |
| torch-eager   | the same without a compiler                                                                          |
| torch-nested  | the same loss by reverse-over-reverse autograd, written as lean as it can be                         |
| torch-func    | the same loss by reverse-over-reverse as torch.func offers it: vmap of grad and of jacrev(grad)      |
| jax           | the JAX engine, jitted                                                                               |

The rows take turns, and the table gives medians; the paper's size unless --interior says otherwise:

    python benchmarks/heat3d_loss.py --threads 2 --repeats 7 --json heat3d_loss.json
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def nested_derivatives(torch: Any, params: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """x → (T, ∇T) and x → (∇T, ∂ᵢᵢT), by autograd of autograd, only what is needed."""
    from kourkoutas.lab import engines
    from kourkoutas.lab.testbeds.heat3d import network

    E = engines.get("torch")

    def slopes(x: Any) -> tuple[Any, Any]:
        T = network.temperature(E, params, x)
        (g,) = torch.autograd.grad(T.sum(), x, create_graph=True)
        return T, g

    def curvatures(x: Any) -> tuple[Any, list[Any]]:
        _, g = slopes(x)
        return g, [torch.autograd.grad(g[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(3)]

    return slopes, curvatures


def func_derivatives(torch: Any, params: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The same by torch.func, one point at a time under vmap."""
    from torch.func import grad_and_value, jacrev, vmap

    from kourkoutas.lab import engines
    from kourkoutas.lab.testbeds.heat3d import network

    E = engines.get("torch")

    def slope(x: Any) -> tuple[Any, Any]:
        return grad_and_value(lambda y: network.temperature(E, params, y[None])[0])(x)

    def slopes(x: Any) -> tuple[Any, Any]:
        g, T = vmap(slope)(x)
        return T, g

    def curvatures(x: Any) -> tuple[Any, list[Any]]:
        def twice(y: Any) -> tuple[Any, Any]:
            g, _ = slope(y)
            return g, g

        H, g = vmap(jacrev(twice, has_aux=True))(x)
        return g, [H[:, k, k] for k in range(3)]

    return slopes, curvatures


def nested_loss(torch: Any, derivatives: Callable[..., Any], params: Any, batch: Any, points: Any) -> Any:
    """The loss of `network.Composite` with other derivatives."""
    from kourkoutas.lab import engines
    from kourkoutas.lab.testbeds.heat3d import network

    E = engines.get("torch")
    n, nb, pairs = points.interior, points.boundary, points.pairs
    sizes = (n, nb, nb, pairs, pairs, nb, nb)
    sets = torch.split(batch["x"][: sum(sizes)], sizes)
    interior, outlet, outer, start, end = (x.clone().requires_grad_() for x in sets[:5])
    inner, inlet = sets[5:]
    # The row of slopes of the outer wall holds its normal, (n_r, n_θ/r, 0).
    first = sum(sizes) + n + nb
    normal = batch["x"][first : first + nb]
    slopes, curvatures = derivatives(torch, params)

    def square(x: Any) -> Any:
        return torch.mean(x**2)

    g, second = curvatures(interior)
    r = interior[:, 0]
    T0, g0 = slopes(start)
    T1, g1 = slopes(end)
    parts = {
        "residual": square(second[0] + g[:, 0] / r + second[1] / r**2 + second[2]),
        "inner": square(network.temperature(E, params, inner) - batch["value"][:nb]),
        "inlet": square(network.temperature(E, params, inlet) - batch["value"][nb:]),
        "outlet": square(slopes(outlet)[1][:, 2] - batch["outlet"]),
        "outer": square((slopes(outer)[1] * normal).sum(1) - batch["outer"]),
        "periodic": square(T0 - T1) + square(g0[:, 1] - g1[:, 1]),
    }
    return sum(network.WEIGHTS[name] * part for name, part in parts.items())


def rows_to_time(settings: Any, skip: set[str]) -> dict[str, Callable[[], Any]]:
    """Name → call; each has been called once, so that nothing is compiled in the timed calls."""
    import torch

    from kourkoutas import _native
    from kourkoutas.lab import engines
    from kourkoutas.lab.testbeds.heat3d import geometry, network

    if _native.taylor is None:
        skip = skip | {"torch-native"}
    points = settings.points
    initial, constants = network.init(settings.width, settings.depth, 0), geometry.constants(points, "paper")
    E = engines.get("torch")
    params = {name: torch.tensor(p, requires_grad=True) for name, p in initial.items()}
    batch = {name: torch.tensor(x) for name, x in constants.items()}
    leaves = list(params.values())

    def torch_row(loss: Callable[..., Any]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(loss(params, batch), leaves)

    weights = [p.detach() for name, p in params.items() if name.endswith(".w")]

    def bare() -> None:
        h = batch["x"]
        inputs = []
        for w in weights:
            inputs.append(h)
            h = h @ w
        for k in range(len(weights) - 1, -1, -1):
            inputs[k].T @ h
            if k:
                h = h @ weights[k].T

    calls: dict[str, Callable[[], Any]] = {
        "bare": bare,
        "torch-native": torch_row(functools.partial(network.Composite(points, native=True), E)),
        "torch-fused": torch_row(functools.partial(network.Composite(points, fused=True), E)),
        "torch-eager": torch_row(functools.partial(network.Composite(points), E)),
        "torch-nested": torch_row(lambda p, b: nested_loss(torch, nested_derivatives, p, b, points)),
        "torch-func": torch_row(lambda p, b: nested_loss(torch, func_derivatives, p, b, points)),
    }
    if "jax" not in skip:
        import jax

        J = engines.get("jax")
        step = jax.jit(jax.value_and_grad(functools.partial(network.Composite(points), J)))
        on_device = [{name: J.array(x) for name, x in d.items()} for d in (initial, constants)]
        calls["jax"] = lambda: jax.block_until_ready(step(*on_device))
    calls = {name: call for name, call in calls.items() if name not in skip}
    for call in calls.values():
        call()
    return calls


def measure(calls: dict[str, Callable[[], Any]], repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of every call; the order turns by one from round to round."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for k in range(repeats):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            start = clock()
            calls[name]()
            times[name].append(clock() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of one Heat3D loss and gradient, as ratios inside one run.")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--interior", type=int, default=4_000, help="boundary sets get half, pairs a tenth of it")
    parser.add_argument("--skip", default="", help="rows to leave out, with commas between them")
    parser.add_argument("--cpu", action="store_true", help="CPU time instead of wall time: steadier on a busy machine")
    parser.add_argument("--json", type=Path, help="write times and ratios to this file")
    args = parser.parse_args()
    # XLA reads its number of threads from the CPUs it may use.
    os.environ.setdefault("OMP_NUM_THREADS", str(args.threads))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.threads])
    import torch

    from kourkoutas.lab.testbeds.heat3d import Settings

    torch.set_num_threads(args.threads)
    settings = Settings(
        width=args.width,
        depth=args.depth,
        interior=args.interior,
        boundary=max(1, args.interior // 2),
        pairs=max(1, args.interior // 10),
    )
    calls = rows_to_time(settings, set(args.skip.split(",")) - {""})
    times = measure(calls, args.repeats, time.process_time if args.cpu else time.perf_counter)
    medians = {name: statistics.median(t) for name, t in times.items()}
    n, m, k = settings.points.counts
    flop = 3 * 2 * (5 * n + 2 * m + k) * args.width**2 * (args.depth - 2)
    print(f"{5 * n + 2 * m + k} rows, {flop / 1e9:.1f} GFLOP in square layers, {args.threads} thread(s)")
    print(f"{'row':<14}{'median s':>10}{'min s':>10}{'/ bare':>9}{'/ eager':>9}{'/ native':>9}")
    for name, median in medians.items():
        ratios = "".join(
            f"{median / medians[base]:>9.2f}" if base in medians else f"{'':>9}"
            for base in ("bare", "torch-eager", "torch-native")
        )
        print(f"{name:<14}{median:>10.4f}{min(times[name]):>10.4f}{ratios}")
    if args.json:
        record = {"arguments": {**vars(args), "json": str(args.json)}, "seconds": times, "medians": medians}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
