r"""K-β in the eigenbasis of its gradients: what `basis="eigen"` is, the same for every front end.

A parameter of two or more axes keeps, for each axis, the second moments of its gradient along that axis, and a basis
of their eigenvectors. Of a matrix, with gradient G:

    L ← μ·L + (1-μ)·G·Gᵀ,   R ← μ·R + (1-μ)·Gᵀ·G              the factors
    G' = Qᵀ·G·P                                                Q, P: the bases, of L and of R

m and v are those of G', and θ moves by Q·Δ'·Pᵀ, where Δ' is K-β's step of m and v. Since ‖G'‖ = ‖G‖, the sunspike and
β2 are what they are without a basis; with a fixed β2 this is SOAP (Vyas et al. 2024, arXiv 2409.11321). The clip of
`max_ratio` bounds the entries of Δ', not those of the step in the parameter's own coordinates.

After every `basis_every` steps the basis turns: its columns are sorted by their eigenvalues diag(QᵀLQ), largest first,
and Q ← qr(L·Q), one step of orthogonal iteration. m turns with it; the entries of v keep their places, so each column
inherits the v of the one it came from.

NOTE: a parameter's first gradient makes the basis, by an eigendecomposition, and moves nothing. In the basis made of a
gradient that gradient is diagonal, and all its other entries are rounding errors, which Adam's division would make as
large as the rest.

NOTE: an axis of length 1, or longer than `basis_limit`, has no factor. A parameter of more than two axes has one per
axis; a complex one is a real one with one more axis, of length 2. Parameters of one axis or none stay in their own
coordinates; they, too, begin to move with their second gradient, so that all begin together.

NOTE: the basis turns after a number of gradients, skipped ones included, since no host needs to look at a device to
count them. A skipped gradient changes neither factors nor basis, also if it was time for the basis to turn.

NOTE: factors are kept with trace 1, beside the root s of their true trace: `factor_weights`. The basis does not depend
on the scale, and squares of gradients below 1e-19 or above 1e19 would not fit into float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

TINY = 1e-30
"""Gradients whose norm is no larger leave the factors as they are: 1/s would not fit into float32."""


def factored_axes(shape: Sequence[int], limit: int) -> tuple[int, ...]:
    """The axes that get a factor.

    >>> factored_axes((128, 3), limit=1024), factored_axes((50_000, 64), limit=1024), factored_axes((128,), limit=1024)
    ((0, 1), (1,), ())
    """
    if len(shape) < 2:
        return ()
    return tuple(axis for axis, length in enumerate(shape) if 1 < length <= limit)


def factor_weights(memory: float, norm: Any, scale: Any, xp: Any) -> tuple[Any, Any, Any]:
    """(keep, gain, s) for L ← keep·L + (gain·G)(gain·G)ᵀ, which leaves L with trace 1.

    s² ← μ·s² + (1-μ)·n² is the trace of the factors that the equations mean; L is theirs divided by it.

    Args:
      memory: μ.
      norm: n of each parameter's gradient.
      scale: s of each parameter before this gradient; 0 before the first.
      xp: the array namespace.
    """
    largest = xp.where(norm > scale, norm, scale)
    counts = largest > TINY
    unit = xp.where(counts, largest, 1.0)
    new = unit * xp.sqrt(memory * (scale / unit) ** 2 + (1 - memory) * (norm / unit) ** 2)
    safe = xp.where(counts, new, 1.0)
    keep = xp.where(counts, memory * (scale / safe) ** 2, 1.0)
    gain = xp.where(counts, (1 - memory) ** 0.5 / safe, 0.0)
    return keep, gain, xp.where(counts, new, scale)


def is_time_to_turn(seen: Any, every: int) -> Any:
    """Whether the basis turns after a parameter's gradient number `seen`, counted from 0."""
    return (seen > 0) & (seen % every == 0)
