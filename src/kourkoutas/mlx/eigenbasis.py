"""The part of a step that `basis="eigen"` adds; `kourkoutas.eigenbasis` says what it computes, `layout` what is kept.

All parameters of one shape are worked on together, as a stack along a first axis: axis i of a parameter is axis i + 1
of its stack. Moments and parameters move one by one, as they do without a basis.

NOTE: MLX has QR and the eigendecomposition on the CPU only. They run on its CPU stream, whatever device the rest runs
on: when the basis is made, and once in `basis_every` steps.

NOTE: products of float32 on some GPUs are rounded like TF32 unless the environment variable MLX_ENABLE_TF32 is 0 when
MLX starts. The bases stay orthonormal all the same, since QR does not run there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from kourkoutas.eigenbasis import factor_weights, is_time_to_turn
from kourkoutas.mlx.arithmetic import chosen, moved, own_coefficients, subtracted
from kourkoutas.mlx.layout import Kind, Layout, Members, State, basis_age, precision
from kourkoutas.rule import Hyper


class Stack(NamedTuple):
    """The parameters of one kind that have a gradient in this step.

    Attributes:
      kind: the shape, with all parameters that have it.
      numbers: the parameters, by their numbers in the lists of the step.
      rows: their places in the stacks of the state.
      moving: which of `numbers` move, by their places in it.
      making: whose basis is made of this gradient, which moves nothing.
      turning: whose basis turns after the step.
    """

    kind: Kind
    numbers: tuple[int, ...]
    rows: tuple[int, ...]
    moving: tuple[int, ...]
    making: tuple[int, ...]
    turning: tuple[int, ...]


@functools.lru_cache(maxsize=256)
def stacks_of(kinds: tuple[Kind, ...], paths: tuple[str, ...], ages: tuple[int, ...], every: int) -> tuple[Stack, ...]:
    """The stacks of a step in which the parameters `paths` have a gradient, and bases of these ages."""
    number_of = {path: number for number, path in enumerate(paths)}
    stacks = []
    for kind in kinds:
        rows = tuple(row for row, path in enumerate(kind.paths) if path in number_of)
        numbers = tuple(number_of[kind.paths[row]] for row in rows)
        moving: list[int] = []
        making: list[int] = []
        turning: list[int] = []
        for place, number in enumerate(numbers):
            (moving if ages[number] else making).append(place)
            if is_time_to_turn(ages[number], every):
                turning.append(place)
        if numbers:
            stacks.append(Stack(kind, numbers, rows, tuple(moving), tuple(making), tuple(turning)))
    return tuple(stacks)


class EigenStep:
    """One step in the eigenbasis: what the optimizer does otherwise than without a basis.

    Attributes:
      ages: of the bases, as `layout` describes them.
      stacks: the parameters that have a basis.
      taken: which parameters are not skipped; None: all.
      pending: what `take_in` put into the state.
    """

    def __init__(self, layout: Layout, members: Members, state: State, paths: Sequence[str]) -> None:
        self.hyper, self.members, self.state, self.paths = layout.hyper, members, state, tuple(paths)
        self.ages = tuple(state["basis_age"][path].size for path in paths)
        self.stacks = stacks_of(layout.kinds, self.paths, self.ages, self.hyper.basis_every)
        self.taken: mx.array | None = None
        self.pending: list[mx.array] = []

    @property
    def starts(self) -> mx.array | None:
        """Which parameters only make their basis, as `rule.step` takes it.

        NOTE: one value where all do, so that their step count stays one number.
        """
        starts = [age == 0 for age in self.ages]
        if not any(starts):
            return None
        return mx.array(True) if all(starts) else mx.array(starts)

    def take_in(self, grads: list[mx.array], norms: mx.array | None, updated: mx.array | None) -> list[mx.array]:
        """Add the gradients to their factors, and give them in their bases.

        Args:
          grads: of the parameters that have one.
          norms: ||g|| of each.
          updated: which buckets are not skipped; None: all.
        """
        self.taken = None if updated is None else self.members.spread(updated)
        intake = compiled_intake(self.stacks, self.hyper.basis_memory)
        scales = [self._kept(stack, "factor_scale") for stack in self.stacks]
        grads, scales, factors = intake(grads, norms, self.taken, scales, self._each("factor"), self._each("basis"))
        for stack, scale, new in zip(self.stacks, scales, factors, strict=True):
            self._keep(stack, "factor_scale", scale)
            for name, factor in zip(_names(stack, "factor"), new, strict=True):
                self._keep(stack, name, factor)
            self.pending += [scale, *new]
        return grads

    def update(
        self,
        k: dict[str, mx.array],
        grads: list[mx.array],
        params: list[mx.array],
        slots: list[list[mx.array]],
    ) -> list[list[mx.array]]:
        """(parameters, moments) after the step; the state has the bases that were made or have turned."""
        moves = tuple(age > 0 for age in self.ages)
        update = compiled_update(self.hyper, self.members, self.stacks, moves)
        new, bases = update(k, self.taken, grads, params, slots, self._each("factor"), self._each("basis"))
        for stack, changed in zip(self.stacks, bases, strict=True):
            if stack.making or stack.turning:
                for name, basis in zip(_names(stack, "basis"), changed, strict=True):
                    self._keep(stack, name, basis)
        self._count()
        return new  # type: ignore[no-any-return]

    def _count(self) -> None:
        """Let every basis be one gradient older; those that turned are new."""
        every = self.hyper.basis_every
        after = [1 if is_time_to_turn(age, every) else age + 1 for age in self.ages]
        arrays = {age: basis_age(age) for age in set(after)}
        self.state["basis_age"].update({path: arrays[age] for path, age in zip(self.paths, after, strict=True)})

    def _each(self, what: str) -> list[list[mx.array]]:
        """The factors or the bases of each stack, an array for each axis."""
        found = []
        for stack in self.stacks:
            found.append([self._kept(stack, name) for name in _names(stack, what)])
        return found

    def _kept(self, stack: Stack, name: str) -> mx.array:
        return _some(self.state[name][stack.kind.shape], stack.rows)

    def _keep(self, stack: Stack, name: str, new: mx.array) -> None:
        stacks = self.state[name]
        stacks[stack.kind.shape] = _replaced(stacks[stack.kind.shape], stack.rows, new)


def _names(stack: Stack, what: str) -> list[str]:
    """In the state, of the factors or the bases of a stack."""
    return [f"{what}_{axis}" for axis in stack.kind.axes]


@functools.lru_cache(maxsize=256)
def compiled_intake(stacks: tuple[Stack, ...], memory: float) -> Callable[..., Any]:
    """(gradients in their bases, scales, factors): what `EigenStep.take_in` does."""

    def intake(
        grads: list[mx.array],
        norms: mx.array,
        taken: mx.array | None,
        scales: list[mx.array],
        factors: list[list[mx.array]],
        bases: list[list[mx.array]],
    ) -> tuple[list[mx.array], list[mx.array], list[list[mx.array]]]:
        out, new_scales, new_factors = list(grads), [], []
        for stack, s, old, q in zip(stacks, scales, factors, bases, strict=True):
            numbers = mx.array(stack.numbers, mx.int32)
            g = mx.stack([grads[i].astype(s.dtype) for i in stack.numbers])
            keep, gain, new = factor_weights(memory, norms[numbers].astype(s.dtype), s, mx)
            if taken is not None:
                took = taken[numbers]
                g = mx.where(_column(took, g), g, 0)
                keep, gain, new = mx.where(took, keep, 1), mx.where(took, gain, 0), mx.where(took, new, s)
            new_scales.append(new)
            new_factors.append(_with_moments(stack.kind.axes, old, keep, _column(gain, g) * g))
            # G' = Qᵀ·G·P
            turned = rotated(_some(g, stack.moving), stack.kind.axes, [_some(x, stack.moving) for x in q])
            for i, place in enumerate(stack.moving):
                out[stack.numbers[place]] = turned[i]
        return out, new_scales, new_factors

    return mx.compile(intake)


@functools.lru_cache(maxsize=256)
def compiled_update(
    hyper: Hyper, members: Members, stacks: tuple[Stack, ...], moves: tuple[bool, ...]
) -> Callable[..., Any]:
    """((parameters, moments), bases): what `EigenStep.update` does; `moves` says which parameters do."""

    def update(
        k: dict[str, mx.array],
        taken: mx.array | None,
        grads: list[mx.array],
        params: list[mx.array],
        slots: list[list[mx.array]],
        factors: list[list[mx.array]],
        bases: list[list[mx.array]],
    ) -> tuple[list[list[mx.array]], list[list[mx.array]]]:
        deltas, moments = list(grads), [list(arrays) for arrays in slots]
        for i, (g, p, *old) in enumerate(zip(grads, params, *slots, strict=True)):
            if moves[i]:
                dtype = precision([p])
                deltas[i], new = moved(hyper, g.astype(dtype), old, own_coefficients(k, i, dtype))
                for arrays, x in zip(moments, chosen(taken, i, new, old), strict=True):
                    arrays[i] = x
        for stack, q in zip(stacks, bases, strict=True):
            _rotate_back(stack, q, deltas)
        out = list(params)
        for i, (p, delta) in enumerate(zip(params, deltas, strict=True)):
            if moves[i]:
                dtype = precision([p])
                theta = subtracted(hyper, p.astype(dtype), delta.astype(dtype), own_coefficients(k, i, dtype))
                [out[i]] = chosen(taken, i, [theta], [p])
        new_bases = []
        for stack, factor, q in zip(stacks, factors, bases, strict=True):
            if stack.making:
                q = _made(stack, taken, factor, q)
            if stack.turning:
                q = _turned(stack, taken, factor, q, moments)
            new_bases.append(q)
        return [out, *moments], new_bases

    return mx.compile(update)


def _rotate_back(stack: Stack, bases: list[mx.array], deltas: list[mx.array]) -> None:
    """Q·Δ'·Pᵀ instead of Δ', of those parameters that move."""
    numbers = [stack.numbers[place] for place in stack.moving]
    if numbers:
        delta = mx.stack([deltas[i].astype(bases[0].dtype) for i in numbers])
        back = rotated(delta, stack.kind.axes, [_some(q, stack.moving) for q in bases], back=True)
        for row, i in enumerate(numbers):
            deltas[i] = back[row]


def _made(stack: Stack, taken: mx.array | None, factors: list[mx.array], bases: list[mx.array]) -> list[mx.array]:
    """The bases, with those of the parameters that begin made of their factors."""
    places, made = stack.making, []
    for factor, basis in zip(factors, bases, strict=True):
        new = _unless_skipped(stack, places, taken, eigenvectors(_some(factor, places)), _some(basis, places))
        made.append(_replaced(basis, places, new))
    return made


def _turned(
    stack: Stack, taken: mx.array | None, factors: list[mx.array], bases: list[mx.array], moments: list[list[mx.array]]
) -> list[mx.array]:
    """The bases, with those turned whose time it is; in `moments` m turns with them, the others keep their places."""
    axes, places = stack.kind.axes, stack.turning
    numbers = [stack.numbers[place] for place in places]
    old_bases = [_some(basis, places) for basis in bases]
    old = [mx.stack([arrays[i].astype(bases[0].dtype) for i in numbers]) for arrays in moments]
    others, new_bases = old[1:], []
    for axis, factor, basis in zip(axes, factors, old_bases, strict=True):
        turned, order = iterated(_some(factor, places), basis)
        new_bases.append(_unless_skipped(stack, places, taken, turned, basis))
        others = [_reordered(x, order, axis) for x in others]
    m = rotated(old[0], axes, old_bases, back=True)
    new = [rotated(m, axes, new_bases), *others]
    for arrays, x, y in zip(moments, new, old, strict=True):
        x = _unless_skipped(stack, places, taken, x, y)
        for row, i in enumerate(numbers):
            arrays[i] = x[row].astype(arrays[i].dtype)
    return [_replaced(basis, places, x) for basis, x in zip(bases, new_bases, strict=True)]


def _unless_skipped(
    stack: Stack, places: tuple[int, ...], taken: mx.array | None, new: mx.array, old: mx.array
) -> mx.array:
    """The rows of `new`, or those of `old` where the parameters at `places` of the stack are skipped."""
    if taken is None:
        return new
    took = taken[mx.array([stack.numbers[place] for place in places], mx.int32)]
    return mx.where(_column(took, new), new, old)


def _some(x: mx.array, rows: tuple[int, ...]) -> mx.array:
    """Some rows of a stack, in ascending order."""
    return x if len(rows) == len(x) else x[mx.array(rows, mx.int32)]


def _replaced(x: mx.array, rows: tuple[int, ...], new: mx.array) -> mx.array:
    """A stack with new rows in the place of some."""
    if len(rows) == len(x):
        return new
    source = list(range(len(x)))
    for i, row in enumerate(rows):
        source[row] = len(x) + i
    return mx.concatenate([x, new])[mx.array(source, mx.int32)]


def _column(x: mx.array, like: mx.array) -> mx.array:
    """A vector with an entry per array of a stack, so that it goes with the stack `like`."""
    return x.reshape(-1, *[1] * (like.ndim - 1))


# Linear algebra of stacks


def rotated(x: mx.array, axes: Sequence[int], bases: Sequence[mx.array], *, back: bool = False) -> mx.array:
    """Qᵀ·x·P of each matrix, and the same along the axes of other arrays; Q·x·Pᵀ on the way `back`."""
    for axis, q in zip(axes, bases, strict=True):
        x = _product(q if back else q.swapaxes(1, 2), x, axis)
    return x


def _product(matrix: mx.array, x: mx.array, axis: int) -> mx.array:
    """matrix·x along one axis."""
    count, length = len(x), x.shape[axis + 1]
    before, after = math.prod(x.shape[1 : axis + 1]), math.prod(x.shape[axis + 2 :])
    if after == 1:
        product = x.reshape(count, before, length) @ matrix.swapaxes(1, 2)
    elif before == 1:
        product = matrix @ x.reshape(count, length, after)
    else:
        product = matrix[:, None] @ x.reshape(count, before, length, after)
    return product.reshape(x.shape)


def _with_moments(axes: Sequence[int], factors: Sequence[mx.array], keep: mx.array, x: mx.array) -> list[mx.array]:
    """L ← keep·L + X·Xᵀ along every axis that has a factor; `keep` has an entry per array."""
    new = []
    for axis, factor in zip(axes, factors, strict=True):
        rest = x.size // max(1, len(x) * x.shape[axis + 1])
        flat = mx.moveaxis(x, axis + 1, 1).reshape(len(x), x.shape[axis + 1], rest)
        new.append(_column(keep, factor) * factor + flat @ flat.swapaxes(1, 2))
    return new


def eigenvectors(factor: mx.array) -> mx.array:
    """Those of the largest eigenvalue first; of what is not finite, which LAPACK refuses, those of zero."""
    finite = mx.nan_to_num(factor, nan=0.0, posinf=0.0, neginf=0.0)
    _, vectors = mx.linalg.eigh(finite, stream=mx.cpu)  # type: ignore[arg-type]
    return vectors[:, :, ::-1]


def iterated(factor: mx.array, basis: mx.array) -> tuple[mx.array, mx.array]:
    """One step of orthogonal iteration: the new basis, and the order into which the old columns were brought first."""
    product = factor @ basis
    # The eigenvalues as far as the basis knows them: diag(Qᵀ·L·Q)
    values = mx.sum(basis * product, axis=1)
    order = mx.argsort(-values, axis=1)
    q, _ = mx.linalg.qr(_reordered(product, order, 1), stream=mx.cpu)  # type: ignore[arg-type]
    return q, order


def _reordered(x: mx.array, order: mx.array, axis: int) -> mx.array:
    """The entries along one axis in another order, which each array has for itself."""
    shape = [1] * x.ndim
    shape[0], shape[axis + 1] = order.shape
    return mx.take_along_axis(x, mx.broadcast_to(order.reshape(shape), x.shape), axis + 1)
