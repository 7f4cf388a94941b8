"""Stacks of arrays of one shape, rotated together: the linear algebra of `basis="eigen"`.

A stack has the arrays of all parameters of one shape along its first axis; axis i of the arrays is axis i + 1 of the
stack. For each axis that has a factor there is a stack of factors, and one of bases with eigenvectors as columns. So
all layers of a kind take part in one product, and in one QR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kourkoutas.torch.lists import NO_FLOAT64


def rotated(x: Tensor, axes: Sequence[int], bases: Sequence[Tensor], *, back: bool = False) -> Tensor:
    """Qᵀ·x·P of each matrix, and the same along the axes of other arrays; Q·x·Pᵀ on the way `back`."""
    for axis, q in zip(axes, bases, strict=True):
        x = torch.matmul(*_operands(q if back else q.transpose(1, 2), x, axis)).view(x.shape)
    return x


class Product(NamedTuple):
    """A product of stacks on fixed memory, which `torch.matmul` takes as it is."""

    left: Tensor
    right: Tensor
    out: Tensor


def planned(
    x: Tensor, axes: Sequence[int], bases: Sequence[Tensor], into: Sequence[Tensor], *, back: bool = False
) -> tuple[list[Product], Tensor]:
    """The products of `rotated`, of tensors that stay where they are, and where the last one ends.

    They go into the one and the other of two tensors in turn.
    """
    products = []
    for number, (axis, q) in enumerate(zip(axes, bases, strict=True)):
        left, right = _operands(q if back else q.transpose(1, 2), x, axis)
        x = into[number % 2]
        products.append(Product(left, right, x.view((left if axis + 2 == x.ndim else right).shape)))
    return products, x


def _operands(matrix: Tensor, x: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """What to multiply for matrix·x along one axis: x is seen as matrices, and the product has the shape of these."""
    count, length = x.shape[0], x.shape[axis + 1]
    before = math.prod(x.shape[1 : axis + 1])
    if axis + 2 == x.ndim:
        return x.reshape(count, before, length), matrix.transpose(1, 2)
    if before == 1:
        return matrix, x.reshape(count, length, -1)
    return matrix.unsqueeze(1), x.reshape(count, before, length, -1)


def unfolded(x: Tensor, axis: int) -> Tensor:
    """Each array as a matrix whose rows lie along one axis."""
    return x.movedim(axis + 1, 1).reshape(x.shape[0], x.shape[axis + 1], -1)


def add_moments(axes: Sequence[int], factors: Sequence[Tensor], keep: Tensor, x: Tensor) -> None:
    """L ← keep·L + X·Xᵀ along every axis that has a factor; `keep` has an entry per array."""
    for axis, factor in zip(axes, factors, strict=True):
        flat = unfolded(x, axis)
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
