r"""A SiLU layer for values, slopes and Laplacians that travel through a network together.

A point x carries its value u, some directional derivatives u_i = ∂_i u along fixed directions, and one second-order
channel L u with L = Σᵢ ∂ᵢ∂ᵢ + (first-order terms). With f(a) = a·σ(a) the chain rule gives

.. math::
    f(a), \qquad ∂_i f(a) = f'(a)\,a_i, \qquad L f(a) = f'(a)\,L a + f''(a) \sum_i a_i^2

so the weighted sum of second derivatives needs one channel, not one for each direction. Of f, with s = σ(a),
u = s(1 - s) and r = 1 - 2s,

.. math::
    f' = s + a u, \qquad f'' = u\,(2 + a r), \qquad f''' = u\,(r\,(3 + a r) - 2 a u)

and with G, Gᵢ and G_L the gradients of the loss with respect to f, its slopes and L f, the C kernel's way back is

.. math::
    a ← f' G + f'' (\sum_i a_i G_i + L a\,G_L) + f''' \sum_i a_i^2\,G_L, \qquad
    a_i ← f' G_i + 2 f'' a_i G_L, \qquad L a ← f' G_L

The rows of all points and channels form one matrix, so that a layer is one matrix product. `counts` = (n, m, k): n
points with value, three slopes and L; m with value and one slope; k with the value alone. Rows, in order:

| rows  | n + m + k | n + m         | n           | n          | n   |
|-------|-----------|---------------|-------------|------------|-----|
| holds | values    | (first) slope | second slope| third slope| L   |
"""

from __future__ import annotations

from kourkoutas.lab.engines import Array, Engine

Counts = tuple[int, int, int]


def rows(counts: Counts) -> tuple[int, int, int, int]:
    """Ends of the first four blocks of rows; the fifth ends at the last row."""
    n, m, k = counts
    ends = (n + m + k, 2 * n + 2 * m + k)
    return (*ends, ends[1] + n, ends[1] + 2 * n)


def taylor_silu(E: Engine, z: Array, b: Array, counts: Counts) -> Array:
    """The channels of f(a) from those of a, where a has the values z + b and the slopes and L of z."""
    n, m, _ = counts
    end = rows(counts)
    a = z[: end[0]] + b
    a1, a2, a3, La = z[end[0] : end[1]], z[end[1] : end[2]], z[end[2] : end[3]], z[end[3] :]
    s = E.sigmoid(a)
    u = s * (1 - s)
    # f' = s + a u;  f'' = u (2 + a r), r = 1 - 2s
    f1 = s[: n + m] + a[: n + m] * u[: n + m]
    f2 = u[:n] * (2 + a[:n] * (1 - 2 * s[:n]))
    g1 = f1[:n]
    # L f = f' L a + f'' Σ a_i²
    Lf = g1 * La + f2 * (E.square(a1[:n]) + E.square(a2) + E.square(a3))
    return E.concat([a * s, f1 * a1, g1 * a2, g1 * a3, Lf])


def taylor_layer(E: Engine, x: Array, w: Array, b: Array, counts: Counts) -> Array:
    """silu(x·w + b) of rows that hold values, slopes and Laplacians."""
    return E.recompute(lambda z, b: taylor_silu(E, z, b, counts), x @ w, b)
