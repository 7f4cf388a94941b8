"""The loss of Testbed B as a list of squares, and the C kernel that sums them.

    Σ weight·(y + bias·b - target - y[partner])²

over rows of a SiLU network: y is a row's output after the layers of `kourkoutas.lab.testbeds.heat3d.taylor` and a last
linear layer, whose bias b is added only where `bias` is 1. The kernel takes blocks of rows through the whole network
and back while they are in cache, so the gradient is found with the loss.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas import _native
from kourkoutas.lab.engines import Array, Engine, HostArrays
from kourkoutas.lab.testbeds.heat3d.geometry import Points
from kourkoutas.lab.testbeds.heat3d.taylor import rows

Squares = tuple[NDArray[Any], ...]
Weights = tuple[tuple[str, float], ...]

# What a row has if nothing is said of it, as the kernel reads it.
COLUMNS: Mapping[str, Any] = {
    "row": np.int32(-1),
    "target": np.int32(-1),
    "partner": np.int32(-1),
    "weight": np.float32(0),
    "bias": np.float32(0),
}


def _blocks(height: int, channels: int, columns: Mapping[str, NDArray[Any]]) -> Squares:
    """Columns (points, channels) cut into blocks of `height` rows, the points of one channel after those of another."""
    points = height // channels
    count = -(-len(columns["row"]) // points)
    out: list[NDArray[Any]] = [np.full(count, channels, np.int32)]
    for name, none in COLUMNS.items():
        full = np.full((count * points, channels), none)
        if name in columns:
            full[: len(columns[name])] = columns[name]
        out.append(full.reshape(count, points, channels).swapaxes(1, 2).reshape(count, height))
    return tuple(out)


@functools.lru_cache(maxsize=16)
def plan(points: Points, weights: Weights, height: int) -> Squares:
    """(channels of each block; row, target, partner, weight and bias of each of its rows), -1 for none.

    Targets are counted through inner wall, inlet, outlet and outer wall.
    """
    n, nb, pairs = points.interior, points.boundary, points.pairs
    end, (_, m, k), w = rows(points.counts), points.counts, dict(weights)

    inside = np.arange(n)[:, None] + [0, end[0], end[1], end[2], end[3]]
    residual = np.zeros((n, 5))
    residual[:, 4] = w["residual"] / n
    five = _blocks(height, 5, {"row": inside, "weight": residual})

    # Outlet, outer wall, and the pairs, both ends of one side by side: blocks hold an even number of points.
    both = np.arange(2 * pairs).reshape(2, pairs).T.ravel()
    sloped = n + np.concatenate([np.arange(2 * nb), 2 * nb + both])
    weight, target, partner = np.zeros((m, 2)), np.full((m, 2), -1), np.full((m, 2), -1)
    weight[: 2 * nb, 1] = np.repeat([w["outlet"] / nb, w["outer"] / nb], nb)
    target[: 2 * nb, 1] = 2 * nb + np.arange(2 * nb)
    start = np.arange(2 * nb, m, 2)
    weight[start] = w["periodic"] / pairs
    partner[start] = (start[:, None] + 1) % (height // 2) + [0, height // 2]
    two = _blocks(
        height, 2, {"row": sloped[:, None] + [0, end[0]], "weight": weight, "target": target, "partner": partner}
    )

    given = {
        "row": n + m + np.arange(k)[:, None],
        "weight": np.repeat([w["inner"] / nb, w["inlet"] / nb], nb)[:, None],
        "target": np.arange(k)[:, None],
        "bias": np.ones((k, 1)),
    }
    one = _blocks(height, 1, given)
    return tuple(np.concatenate(parts) for parts in zip(five, two, one, strict=True))


def native_loss(
    E: Engine, layers: Sequence[Array], x: Array, targets: Array, points: Points, weights: Weights
) -> Array | None:
    """The loss by the C kernel; None where it was not built, or where the arrays are not those of the host.

    Args:
      layers: w, b, w, b, … of all layers.
      x: input rows.
      targets: the numbers that `target` points to.
    """
    kernel = _native.taylor
    if kernel is None:
        return None

    def loss(constants: HostArrays, params: HostArrays, gradients: HostArrays | None, threads: int) -> float:
        squares = plan(points, weights, kernel.ROWS)
        value: float = kernel.loss(*constants, squares, params, gradients, threads, kernel.VARIANTS[0])
        return value

    return E.host_loss(loss, [x, targets], layers)
