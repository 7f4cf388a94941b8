"""The step of a group with `basis="eigen"`; `kourkoutas.eigenbasis` says what it computes.

All parameters of one shape are worked on together, as a `Stack`. Vectors and scalars are stacks without factors, so one
way of updating serves every parameter, and the number of operations depends on the number of shapes only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kourkoutas import eigenbasis
from kourkoutas.rule import Coefficients
from kourkoutas.torch import rotation
from kourkoutas.torch.dtypes import real, wide
from kourkoutas.torch.group import Collected, Group
from kourkoutas.torch.lists import ListStep, norms
from kourkoutas.torch.sharding import is_fsdp1
from kourkoutas.torch.stacks import Stack, Stacked

_PLAIN = (Tensor, torch.nn.Parameter)


class EigenStep(ListStep):
    """One group's step in the eigenbasis, in the stages that `kourkoutas.torch` lists.

    Attributes:
      stacks: what is kept of the parameters that have a gradient.
      grads: their gradients, a tensor for each stack.
      each: ||g|| of each parameter, a tensor for each stack.
    """

    def __init__(self, own: Group, collected: Collected, stacked: Stacked) -> None:
        super().__init__(own, collected)
        self.stacks, self.order, self.back = stacked
        self.grads: list[Tensor] = []
        self.each: list[Tensor] = []

    @classmethod
    def gathered(cls, own: Group, collected: Collected) -> EigenStep:
        """The step of a group whose tensors were collected, after every check."""
        step = cls(own, collected, own.stacks.of(collected.members.places, own.device))
        step.check()
        return step

    def check(self) -> None:
        """Raise if a gradient is not like its parameter, or a parameter is not a whole and plain tensor."""
        self.compare("`param`", self.tensors.params)
        self.compare("`grad`", self.tensors.grads, written=False)
        for place, p in zip(self.members.places, self.tensors.params, strict=True):
            if type(p) not in _PLAIN or is_fsdp1(p):
                raise TypeError(
                    f'`basis` is "eigen", which needs whole and plain tensors; parameter {place} is a '
                    f"{type(p).__name__} or a shard: put it into a group with basis=None"
                )

    def measure(self) -> None:
        for stack in self.stacks:
            grads = wide(real(torch.stack([self.tensors.grads[i] for i in stack.numbers])))
            self.grads.append(-grads if self.group["maximize"] else grads)
        self.each = [self._norms(grads) for grads in self.grads]
        self.norms = self._in_order(self.each)
        if self.hyper.adaptive_tiny:
            self.mean_abs = norms(self.tensors.params, 1, self.dtype, self.device) / self.members.sizes
        self.starts = self._starts()

    def _norms(self, grads: Tensor) -> Tensor:
        """||g|| of each of a stack; where there is no float64, in units of the largest entry."""
        flat = grads.flatten(1) if grads.ndim > 1 else grads.unsqueeze(1)
        if self.dtype is torch.float64 or not flat.numel():
            return torch.linalg.vector_norm(flat, dim=1, dtype=self.dtype)
        largest = flat.abs().amax(1)
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        return torch.linalg.vector_norm(flat / unit.unsqueeze(1), dim=1) * unit

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        """From an entry for each parameter of each stack to one for each of the step's parameters."""
        if not parts:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        return torch.cat([part.to(self.device) for part in parts]).index_select(0, self.back)

    def _by_stack(self, x: Any) -> list[Any]:
        """The other way round: what belongs to each stack; a number, or None, belongs to all."""
        if not isinstance(x, Tensor) or x.ndim == 0:
            return [x] * len(self.stacks)
        return list(x.index_select(0, self.order).split([len(stack.numbers) for stack in self.stacks]))

    def _starts(self) -> Any:
        """Which parameters only make their basis now; None if no one does."""
        first = [stack.seen == 0 for stack in self.stacks]
        if not torch.compiler.is_compiling() and not any(part[0] for part in first):
            return None
        return self._in_order(first)

    def update(self, k: Coefficients, updated: Tensor | None) -> None:
        coefficients = zip(*(self._by_stack(x) for x in k), strict=True)
        taken = None if self.found.updated is None else self.members.spread(self.found.updated)
        each = zip(self.stacks, self.grads, self.each, coefficients, self._by_stack(taken), strict=True)
        for stack, grads, norm, k_stack, took in each:
            if took is not None:  # zeros for what is skipped
                grads = torch.where(as_column(took, grads), grads, 0)
            params = [self.tensors.params[i] for i in stack.numbers]
            _move(stack, params, grads, Coefficients(*(as_column(x, grads) for x in k_stack)))
            if stack.axes:
                _add_to_factors(stack, grads, norm, self.hyper.basis_memory, took)
                _turn(stack, self.hyper.basis_every, took)
            stack.seen.add_(1)


def as_column(x: Any, like: Tensor) -> Any:
    """A vector with an entry per array of a stack, so that it goes with the stack `like`; numbers as they are."""
    if not isinstance(x, Tensor):
        return x
    column = x.to(like.device) if x.dtype is torch.bool else x.to(like.device, like.dtype)
    return column if x.ndim == 0 else column.view(-1, *[1] * (like.ndim - 1))


def _move(stack: Stack, params: list[Tensor], grads: Tensor, k: Coefficients) -> None:
    """The update of `rule.Coefficients` in the basis."""
    m, v, v_hat = stack.m, stack.v, stack.v
    g = rotation.rotated(grads, stack.axes, stack.bases)
    # m ← m + c1·(g - m),  v ← β2·v + c2·g²
    m.lerp_(g, k.c1)
    v.mul_(1 - k.c2).addcmul_(g, g * k.c2)
    if stack.v_max is not None:
        # v̂ = v_max ← max(leak·v_max, v)
        v_hat = stack.v_max.mul_(k.leak)
        torch.maximum(v_hat, v, out=v_hat)
    # Δ = rate·m / (√v̂ + floor), clipped to ±limit
    delta = m / v_hat.sqrt().add_(k.floor)
    delta.mul_(k.rate)
    if k.limit is not None:
        delta = delta.clamp(-k.limit, k.limit)
    delta = rotation.rotated(delta, stack.axes, stack.bases, back=True)
    if k.fade is not None:
        delta = delta + k.fade * wide(real(torch.stack(params)))
    if params[0].is_complex():
        delta = torch.view_as_complex(delta)
    # θ ← θ - (fade·θ + Δ)
    torch._foreach_sub_(params, list(delta.unbind()))


def _add_to_factors(stack: Stack, grads: Tensor, norm: Tensor, memory: float, took: Any) -> None:
    """Factors are made of gradients as they are, in the coordinates of the parameter."""
    keep, gain, scale = eigenbasis.factor_weights(memory, norm.to(stack.scale), stack.scale, torch)
    if took is not None:
        keep, gain = torch.where(took, keep, 1.0), torch.where(took, gain, 0.0)
        scale = torch.where(took, scale, stack.scale)
    stack.scale.copy_(scale)
    rotation.add_moments(stack.axes, stack.factors, keep.to(grads), grads * as_column(gain, grads))


def _turn(stack: Stack, every: int, took: Any) -> None:
    """Make the basis or turn it, if it is time."""
    first, due = stack.seen[0] == 0, eigenbasis.is_time_to_turn(stack.seen[0], every)
    if torch.compiler.is_compiling():
        new = torch.cond(first, lambda: _made(stack), lambda: _turned_if(due, stack))
    elif first:
        new = _made(stack)
    elif due:
        new = _turned(stack)
    else:
        return
    for old, changed in zip(stack.turning(), new, strict=True):
        old.copy_(changed if took is None else torch.where(as_column(took, old), changed, old))


def _turned_if(due: Tensor, stack: Stack) -> list[Tensor]:
    return torch.cond(due, lambda: _turned(stack), lambda: [x.clone() for x in stack.turning()])


def _made(stack: Stack) -> list[Tensor]:
    """What `turning` lists, with a basis made of the factors."""
    moments = [x.clone() for x in stack.moments()]
    return [*moments, *(rotation.eigenvectors(factor) for factor in stack.factors)]


def _turned(stack: Stack) -> list[Tensor]:
    """What `turning` lists, after one step of orthogonal iteration: m turns with the basis, v keeps its places."""
    m, *others = stack.moments()
    m = rotation.rotated(m, stack.axes, stack.bases, back=True)
    bases = []
    for axis, factor, basis in zip(stack.axes, stack.factors, stack.bases, strict=True):
        turned, order = rotation.turned(factor, basis)
        bases.append(turned)
        others = [rotation.reordered(x, order, axis) for x in others]
    return [rotation.rotated(m, stack.axes, bases), *others, *bases]
