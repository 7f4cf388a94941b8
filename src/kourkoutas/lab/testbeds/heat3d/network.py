r"""The network of Testbed B, its loss, and derivatives by forward Taylor propagation.

.. math::
    \text{loss} = ⟨(ΔT)^2⟩ + 0.05\,\big(25\,⟨(T - T_\text{inner})^2⟩ + 100\,⟨(T - T_\text{inlet})^2⟩
    + 25\,⟨(∂_z T - g)^2⟩ + 50\,⟨(∂_n T - g)^2⟩
    + 50\,(⟨(T|_{θ=0} - T|_{θ=2π})^2⟩ + ⟨(∂_θ T|_{θ=0} - ∂_θ T|_{θ=2π})^2⟩)\big)

Each point set carries only the channels that its term needs, see `kourkoutas.lab.testbeds.heat3d.taylor`: five
inside, two where a derivative is given or compared, one where T is given. All of them pass through a layer as one
matrix product, and one reverse pass gives the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Batch, Engine, Params
from kourkoutas.lab.testbeds.heat3d.geometry import Points
from kourkoutas.lab.testbeds.heat3d.squares import native_loss
from kourkoutas.lab.testbeds.heat3d.taylor import rows, taylor_layer

WEIGHTS = {
    "residual": 1.0,
    "inner": 0.05 * 25,
    "inlet": 0.05 * 100,
    "outlet": 0.05 * 25,
    "outer": 0.05 * 50,
    "periodic": 0.05 * 50,
}


def init(width: int, depth: int, seed: int) -> dict[str, NDArray[Any]]:
    """`depth` linear layers 3 → width → … → 1, weights and biases uniform in ±1/√inputs."""
    rng = np.random.default_rng([6, seed])
    sizes = [3, *[width] * (depth - 1), 1]
    params = {}
    for k, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        limit = 1 / np.sqrt(fan_in)
        params[f"layer{k:02d}.w"] = rng.uniform(-limit, limit, (fan_in, fan_out)).astype(np.float32)
        params[f"layer{k:02d}.b"] = rng.uniform(-limit, limit, fan_out).astype(np.float32)
    return params


def depth_of(params: Mapping[str, Any]) -> int:
    return len(params) // 2


def channels(E: Engine, params: Params, x: Array, points: Points) -> Array:
    """The channels of T at rows `x`, as one column; the rows stay in place."""
    last = depth_of(params) - 1
    h = x
    for k in range(last):
        w, b = params[f"layer{k:02d}.w"], params[f"layer{k:02d}.b"]
        h = taylor_layer(E, h, w, b, points.counts)
    return (h @ params[f"layer{last:02d}.w"])[:, 0]


def temperature(E: Engine, params: Params, x: Array) -> Array:
    """T at the points (r, θ, z) in the rows of `x`."""
    last = depth_of(params) - 1
    h = x
    for k in range(last):
        h = E.silu(E.linear(h, params[f"layer{k:02d}.w"], params[f"layer{k:02d}.b"]))
    return E.linear(h, params[f"layer{last:02d}.w"], params[f"layer{last:02d}.b"])[:, 0]


def terms(E: Engine, params: Params, batch: Batch, points: Points) -> dict[str, Array]:
    """The mean squares, without their weights, in the order of `WEIGHTS`."""
    n, nb, pairs = points.interior, points.boundary, points.pairs
    end = rows(points.counts)
    y = channels(E, params, batch["x"], points)
    laplacian = y[end[3] :]
    # A slope does not see the last bias.
    at = end[0] + n
    slope_outlet, slope_outer = y[at : at + nb], y[at + nb : at + 2 * nb]
    slope_start, slope_end = y[at + 2 * nb : at + 2 * nb + pairs], y[at + 2 * nb + pairs : end[1]]
    # Nor does the difference between the two ends of a pair.
    at = n + 2 * nb
    start, stop = y[at : at + pairs], y[at + pairs : at + 2 * pairs]
    miss = y[at + 2 * pairs : end[0]] + params[f"layer{depth_of(params) - 1:02d}.b"] - batch["value"]
    return {
        "residual": E.mean(E.square(laplacian)),
        "inner": E.mean(E.square(miss[:nb])),
        "inlet": E.mean(E.square(miss[nb:])),
        "outlet": E.mean(E.square(slope_outlet - batch["outlet"])),
        "outer": E.mean(E.square(slope_outer - batch["outer"])),
        "periodic": E.mean(E.square(start - stop)) + E.mean(E.square(slope_start - slope_end)),
    }


@dataclass(frozen=True)
class Composite:
    """The loss for point sets of these sizes.

    Attributes:
      native: use the C kernel for the whole loss where it was built and the engine's arrays are those of the host.
    """

    points: Points
    native: bool = False

    def __call__(self, E: Engine, params: Params, batch: Batch) -> Array:
        if self.native:
            # Parameters stand in the order of `init`.
            targets = E.concat([batch["value"], batch["outlet"], batch["outer"]])
            loss = native_loss(E, list(params.values()), batch["x"], targets, self.points, tuple(WEIGHTS.items()))
            if loss is not None:
                return loss
        parts = terms(E, params, batch, self.points)
        return sum((WEIGHTS[name] * part for name, part in parts.items()), start=0.0 * parts["residual"])
