"""Stacks of arrays of one shape, rotated together: the linear algebra of `basis="eigen"`.

A stack has the arrays of all parameters of one shape along its first axis; axis i of the arrays is axis i + 1 of the
stack. For each axis that has a factor there is a stack of factors, and one of bases with eigenvectors as columns. So
all layers of a kind take part in one product, and in one QR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kourkoutas.torch.lists import NO_FLOAT64


def rotated(x: Tensor, axes: Sequence[int], bases: Sequence[Tensor], *, back: bool = False) -> Tensor:
    """Qᵀ·x·P of each matrix, and the same along the axes of other arrays; Q·x·Pᵀ on the way `back`."""
    for axis, q in zip(axes, bases, strict=True):
        x = _product(q if back else q.transpose(1, 2), x, axis)
    return x


def _product(matrix: Tensor, x: Tensor, axis: int) -> Tensor:
    """matrix·x along one axis."""
    count, length = len(x), x.shape[axis + 1]
    before = math.prod(x.shape[1 : axis + 1])
    if axis + 2 == x.ndim:
        product = x.reshape(count, before, length) @ matrix.transpose(1, 2)
    elif before == 1:
        product = matrix @ x.reshape(count, length, -1)
    else:
        product = matrix.unsqueeze(1) @ x.reshape(count, before, length, -1)
    return product.view(x.shape)


def add_moments(axes: Sequence[int], factors: Sequence[Tensor], keep: Tensor, x: Tensor) -> None:
    """L ← keep·L + X·Xᵀ along every axis that has a factor; `keep` has an entry per array."""
    for axis, factor in zip(axes, factors, strict=True):
        flat = x.movedim(axis + 1, 1).reshape(len(x), x.shape[axis + 1], -1)
        factor.mul_(keep.view(-1, 1, 1))
        factor.baddbmm_(flat, flat.transpose(1, 2))


def eigenvectors(factor: Tensor) -> Tensor:
    """Those of the largest eigenvalue first; of what is not finite, which LAPACK refuses, those of zero.

    NOTE: in float64, and on the CPU where a device has none. In float32 LAPACK sometimes does not converge where many
    rows are zero, as in the gradient of an embedding. It is done once for each parameter.
    """
    finite = torch.nan_to_num(factor, 0.0, 0.0, 0.0)
    if factor.device.type in NO_FLOAT64:
        finite = finite.cpu()
    found = torch.linalg.eigh(finite.double()).eigenvectors.flip(-1)
    return _contiguous(found.to(factor))


def turned(factor: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """One step of orthogonal iteration: the new basis, and the order into which the old columns were brought first."""
    product = factor @ basis
    # The eigenvalues as far as the basis knows them: diag(Qᵀ·L·Q)
    values = (basis * product).sum(1)
    order = values.argsort(dim=1, descending=True, stable=True)
    product = product.gather(2, order.unsqueeze(1).expand_as(product))
    return _contiguous(torch.linalg.qr(product).Q), order


def _contiguous(x: Tensor) -> Tensor:
    """A copy in the order of its axes: both branches of a `torch.cond` must have the same strides, and no aliases."""
    return x.clone(memory_format=torch.contiguous_format)


def reordered(x: Tensor, order: Tensor, axis: int) -> Tensor:
    """The entries along one axis in another order, which each array has for itself."""
    shape = [1] * x.ndim
    shape[0], shape[axis + 1] = order.shape
    return x.gather(axis + 1, order.view(shape).expand_as(x))
