"""The step in the eigenbasis with the C kernel's help, for plain tensors on the CPU.

The kernel knows nothing of bases. In the place of each parameter that has one it gets a stand-in: zeros, with the
rotated gradient. It moves m and v as ever, and the zeros by -Δ', which is rotated back and added to the parameter.
Parameters without a basis it moves by itself. Its norms of the rotated gradients are those of the gradients, and weigh
the factors. It moves the factors of matrices and turns the bases, too, if torch has BLAS and LAPACK. What is left to do
here are the rotations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kourkoutas import eigenbasis
from kourkoutas.rule import Hyper
from kourkoutas.torch import kernel, rotation
from kourkoutas.torch.eigenbasis import EigenStep, add_to_factors
from kourkoutas.torch.lists import real
from kourkoutas.torch.recorder import Row
from kourkoutas.torch.rotation import Product
from kourkoutas.torch.stacks import Stack


class StandIns(NamedTuple):
    """A group with stand-ins in the place of parameters that have a basis, as `kernel.gather` wants to see it."""

    group: dict[str, Any]
    hyper: Hyper
    packed: bytes | None
    bucket_names: list[str]
    bucket_of: list[int]
    scalars: Any
    views: tuple[list[Tensor] | None, ...]


class Plan(NamedTuple):
    """What a step does with a stack that has a basis, on memory that is kept from step to step.

    NOTE: to ask for memory anew takes as long as a product, and so does making a dozen views.
    """

    stack: Stack
    grads: Tensor  # G
    rotated: Tensor  # G'
    moved: Tensor  # the stand-ins: zeros, and -Δ' after the kernel's step
    forth: list[Product]  # G' = Qᵀ·G·P
    back: list[Product]  # Q·Δ'·Pᵀ
    change: Tensor  # where this ends
    sides: list[Tensor | None] | None  # the factors of a matrix's rows and columns; None if it is no matrix


def plans_of(stacks: Sequence[Stack]) -> list[Plan]:
    """A plan for each stack that has a basis."""
    plans = []
    for stack in stacks:
        if not stack.axes:
            continue
        grads, rotated, moved = (torch.zeros_like(stack.m) for _ in range(3))
        first, second = (rotated, moved) if len(stack.axes) % 2 else (moved, rotated)  # so that it ends in `rotated`
        forth, _ = rotation.planned(grads, stack.axes, stack.bases, (first, second))
        back, change = rotation.planned(moved, stack.axes, stack.bases, (rotated, moved), back=True)
        plans.append(Plan(stack, grads, rotated, moved, forth, back, change, _sides(stack)))
    return plans


def _sides(stack: Stack) -> list[Tensor | None] | None:
    """The factors of the rows and of the columns, None where there are none; None for arrays that are no matrices."""
    if stack.m.ndim != 3:
        return None
    factor_of = dict(zip(stack.axes, stack.factors, strict=True))
    return [factor_of.get(0), factor_of.get(1)]


class EigenKernelStep(EigenStep):
    """One group's step, where it `takes` the tensors.

    Attributes:
      plans: of the stacks that have a basis.
      inner: the kernel's own step.
    """

    plans: list[Plan]
    inner: kernel.KernelStep

    def takes(self, state: Any) -> bool:
        """Whether the kernel takes every tensor, and all bases are made.

        A skipped gradient must leave the factors alone, and ⟨|θ|⟩ is that of the parameter: only the step by torch's
        operations knows them in time.
        """
        hyper = self.hyper
        if hyper.nonfinite == "skip" or hyper.adaptive_tiny or (hyper.lr_warmup and hyper.weight_decay != 0):
            return False
        if 0 in self.seen:
            return False
        if self.own.stacks.plans is None:
            self.own.stacks.plans = plans_of(self.stacks)
        self.plans = self.own.stacks.plans
        inner = kernel.gather(*self._stand_ins(state))
        if inner is None:
            return False
        self.inner = inner
        return True

    def _stand_ins(self, state: Any) -> tuple[Any, dict[Tensor, Any]]:
        """The group that the kernel gets, and its state: that of the parameters, which shows m and v in the basis."""
        own = self.own
        params = list(self.group["params"])
        states = dict(state)
        for plan in self.plans:
            stand_ins, grads = plan.moved.unbind(), plan.rotated.unbind()
            for number, stand_in, grad in zip(plan.stack.numbers, stand_ins, grads, strict=True):
                place = self.members.places[number]
                states[stand_in] = state[params[place]]
                params[place] = stand_in
                stand_in.grad = grad
        group = {"params": params, "lr": self.group["lr"]}
        found = StandIns(group, own.hyper, own.packed, own.bucket_names, own.bucket_of, own.scalars, own.views)
        return found, states

    def measure(self) -> None:
        for plan in self.plans:
            self._stack_grads(plan.stack, plan.grads)
            _multiply(plan.forth)
            plan.moved.zero_()
        self.inner.measure()

    def _stack_grads(self, stack: Stack, out: Tensor) -> None:
        grads = [real(self.tensors.grads[i]) for i in stack.numbers]
        if grads[0].dtype is out.dtype:
            torch.stack(grads, out=out)
        else:
            torch._foreach_copy_(out.unbind(), grads)

    def first_bad(self) -> str | None:
        return self.inner.first_bad()

    def apply(self, row: Row | None = None) -> None:
        self.inner.apply(row)
        fade = self.inner.lr * self.hyper.weight_decay or None
        for plan, (keep, gain) in zip(self.plans, self._weights(), strict=True):
            _multiply(plan.back)
            self.add(plan.stack, plan.change, fade)
            _add_to_factors(plan, keep, gain)
        self.turn_all()

    def _weights(self) -> list[Sequence[Tensor]]:
        """(keep, gain) of `eigenbasis.factor_weights` for each stack, worked out at once; the scales move."""
        if not self.plans:
            return []
        counts = [len(plan.stack.numbers) for plan in self.plans]
        norm = self._norms()
        scale = torch.cat([plan.stack.scale for plan in self.plans])
        with np.errstate(all="ignore"):  # a gradient that is not finite
            weights = eigenbasis.factor_weights(self.hyper.basis_memory, norm, scale.numpy(), np)
        table = torch.from_numpy(np.stack(weights))
        torch._foreach_copy_([plan.stack.scale for plan in self.plans], table[2].split(counts))
        return [part.unbind() for part in table[:2].split(counts, 1)]

    def _norms(self) -> Any:
        """||g|| of the parameters of each plan: what the kernel found, which is the root of a sum of squares."""
        each = np.array(self.inner.gradient_norms())
        places = np.array(self.members.places)
        norm = np.concatenate([each[places[plan.stack.numbers]] for plan in self.plans])
        if np.isfinite(norm).all():
            return norm
        return torch.cat([self.norms_of(plan.grads) for plan in self.plans]).numpy()

    def turn_all(self, taken: Sequence[Any] | None = None) -> None:
        if not kernel.has_lapack:
            super().turn_all(taken)
            return
        for plan in self.plans:
            if eigenbasis.is_time_to_turn(int(plan.stack.seen[0]), self.hyper.basis_every):
                _turn(plan)
        for stack in self.stacks:
            stack.seen.add_(1)


def _multiply(products: Sequence[Product]) -> None:
    for left, right, out in products:
        # `bmm` is what `matmul` comes to in the end
        (torch.bmm if left.ndim == right.ndim == 3 else torch.matmul)(left, right, out=out)


def _add_to_factors(plan: Plan, keep: Tensor, gain: Tensor) -> None:
    """What `eigenbasis.add_to_factors` does, in one product for each factor and nothing around it.

    The kernel squares `gain`, and takes none whose square is near the limits of float32.
    """
    if kernel.has_lapack and plan.sides is not None:
        threads = torch.get_num_threads()
        if kernel.extension.add_moments(plan.grads, *plan.sides, keep, gain, threads):
            return
    add_to_factors(plan.stack, plan.grads, keep, gain)


def _turn(plan: Plan) -> None:
    """What `eigenbasis._turned` does, by LAPACK without torch around it: a matrix is one thread's work there."""
    stack = plan.stack
    plan.moved.copy_(stack.m)
    _multiply(plan.back)
    plan.grads.copy_(plan.change)
    _, *others = stack.moments()
    for axis, factor, basis in zip(stack.axes, stack.factors, stack.bases, strict=True):
        order = torch.empty(basis.shape[:2], dtype=torch.int64)
        kernel.extension.turn(torch.matmul(factor, basis), basis, order, torch.get_num_threads())
        for x in others:
            x.copy_(rotation.reordered(x, order, axis))
    _multiply(plan.forth)
    stack.m.copy_(plan.rotated)
