"""The step of a group with `basis="eigen"`; `kourkoutas.eigenbasis` says what it computes.

All parameters of one shape are worked on together, as a `Stack`. Vectors and scalars are stacks without factors, so one
way of updating serves every parameter, and the number of operations depends on the number of shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kourkoutas import eigenbasis
from kourkoutas.rule import Coefficients
from kourkoutas.torch import rotation, rounding
from kourkoutas.torch.group import Collected, Group
from kourkoutas.torch.lists import ListStep, cannot_be_written, norms, real, wide
from kourkoutas.torch.stacks import Stack, Stacked, Stacks

_PLAIN = (Tensor, torch.nn.Parameter)
_SAFE = 1e-15  # norms above this, and below its inverse, are sums of squares that float32 holds


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
        # How many gradients there were before this one; a compiled step asks the tensors.
        self.seen = [] if torch.compiler.is_compiling() else [int(stack.seen[0]) for stack in self.stacks]
        in_float64 = any(stack.m.dtype is torch.float64 for stack in self.stacks)
        self.wide = torch.float64 if in_float64 else torch.float32

    @classmethod
    def gathered(cls, own: Group, collected: Collected, state: Any) -> Self:
        """The step of a group whose tensors were collected, after every check."""
        step = cls(own, collected, stacked(own, collected, state))
        step.check()
        return step

    def check(self) -> None:
        """Raise if a gradient is not like its parameter."""
        for place, p, g in zip(self.members.places, self.tensors.params, self.tensors.grads, strict=True):
            if g.shape != p.shape or g.device != p.device or cannot_be_written(p):
                raise RuntimeError(
                    f"`grad` of parameter {place} has another shape or device than the parameter, or the parameter was "
                    "made in inference mode: set it anew"
                )

    def measure(self) -> None:
        for stack in self.stacks:
            grads = wide(real(torch.stack([self.tensors.grads[i] for i in stack.numbers])))
            self.grads.append(-grads if self.group["maximize"] else grads)
        self.each = [self.norms_of(grads) for grads in self.grads]
        self.norms = self._in_order(self.each)
        if self.hyper.adaptive_tiny:
            self.mean_abs = norms(self.tensors.params, 1, self.dtype, self.device) / self.members.sizes
        self.starts = self._starts()

    def norms_of(self, grads: Tensor) -> Tensor:
        """||g|| of each of a stack, which does not overflow before it must: see the note on norms in `rule`."""
        flat = grads.flatten(1) if grads.ndim > 1 else grads.unsqueeze(1)
        if self.device.type == "cpu" and not torch.compiler.is_compiling():
            found: Tensor = torch.linalg.vector_norm(flat, dim=1)
            if float(found.min()) > _SAFE and float(found.max()) < 1 / _SAFE:
                return found.to(self.dtype)
        if self.dtype is torch.float64 or not flat.numel():
            found = torch.linalg.vector_norm(flat, dim=1, dtype=self.dtype)
            return found
        largest = flat.abs().amax(1)
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        found = torch.linalg.vector_norm(flat / unit.unsqueeze(1), dim=1)
        return found * unit

    def _in_order(self, parts: list[Tensor]) -> Tensor:
        """From an entry for each parameter of each stack to one for each of the step's parameters."""
        if not parts:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        return torch.cat([part.to(self.device) for part in parts]).index_select(0, self.back)

    def _by_stack(self, vectors: list[Any]) -> list[list[Any]]:
        """The other way round: of several vectors, the entries of each stack; a number, or None, belongs to all.

        All vectors go to the stacks' dtype, and into their order, in one piece: each operation takes its time.
        """
        places = [i for i, x in enumerate(vectors) if isinstance(x, Tensor) and x.ndim]
        sizes = [len(stack.numbers) for stack in self.stacks]
        found: list[list[Any]] = [list(vectors) for _ in self.stacks]
        if places:
            table = torch.stack([vectors[i] for i in places]).index_select(1, self.order).to(self.wide)
            for of_stack, columns in zip(found, table.split(sizes, 1), strict=True):
                for i, column in zip(places, columns.unbind(), strict=True):
                    of_stack[i] = column
        return found

    def _starts(self) -> Any:
        """Which parameters only make their basis now; None if no one does."""
        if not torch.compiler.is_compiling() and 0 not in self.seen:
            return None
        return self._in_order([stack.seen == 0 for stack in self.stacks])

    def update(self, k: Coefficients, updated: Tensor | None) -> None:
        coefficients = self._by_stack(list(k))
        taken: list[Any] = [None] * len(self.stacks)
        if self.found.updated is not None:
            each = self.members.spread(self.found.updated)
            taken = list(each.index_select(0, self.order).split([len(stack.numbers) for stack in self.stacks]))
        weights = self._factor_weights()
        for number, stack in enumerate(self.stacks):
            grads, took = self.grads[number], taken[number]
            if took is not None:  # zeros for what is skipped
                grads = torch.where(as_column(took, grads), grads, 0)
            k_stack = Coefficients(*(as_column(x, grads) for x in coefficients[number]))
            self.add(stack, _update(stack, grads, k_stack), k_stack.fade)
            if stack.axes:
                keep, gain, scale = weights[number]
                if took is not None:
                    keep, gain = torch.where(took, keep, 1.0), torch.where(took, gain, 0.0)
                    scale = torch.where(took, scale, stack.scale)
                stack.scale.copy_(scale)
                add_to_factors(stack, grads, keep, gain)
        self.turn_all(taken)

    def turn_all(self, taken: Sequence[Any] | None = None) -> None:
        """Make or turn the bases for which it is time, and count the gradient."""
        every = self.hyper.basis_every
        for number, stack in enumerate(self.stacks):
            took = None if taken is None else taken[number]
            if not stack.axes:
                continue
            if torch.compiler.is_compiling():
                _turn_in_graph(stack, every, took)
            elif self.seen[number] == 0:
                _replace(stack, _made(stack), took)
            elif eigenbasis.is_time_to_turn(self.seen[number], every):
                _replace(stack, _turned(stack), took)
        for stack in self.stacks:
            stack.seen.add_(1)

    def _factor_weights(self) -> list[Sequence[Tensor]]:
        """`eigenbasis.factor_weights` of each stack, worked out for all of them at once."""
        if not self.stacks:
            return []
        scale = torch.cat([stack.scale for stack in self.stacks])
        norm = torch.cat(self.each).to(scale)
        weights = torch.stack(eigenbasis.factor_weights(self.hyper.basis_memory, norm, scale, torch))
        each = weights.split([len(stack.numbers) for stack in self.stacks], 1)
        return [part.unbind() for part in each]

    def add(self, stack: Stack, change: Tensor, fade: Any) -> None:
        """θ ← θ + (change - fade·θ)."""
        params = [self.tensors.params[i] for i in stack.numbers]
        if fade is not None:
            change = change - fade * wide(real(torch.stack(params)))
        if params[0].is_complex():
            change = torch.view_as_complex(change)
        if params[0].dtype is not torch.bfloat16 or not self.group["stochastic_rounding"]:
            torch._foreach_add_(params, list(change.unbind()))
            return
        for i, p, each in zip(stack.numbers, params, change.unbind(), strict=True):
            bits = rounding.noise_of("param", self.noise_bits(self.members.places[i], p))
            p.copy_(rounding.rounded(p.float() + each, bits))


def stacked(own: Group, collected: Collected, state: Any) -> Stacked:
    """What is kept of a step's parameters; missing state is made."""
    needed = own.group["params"], own.hyper.basis_limit, own.moment_names
    if own.stacks is None or own.stacks.made_for != Stacks.key(*needed):
        _check_whole(own)
        own.stacks = Stacks(*needed)
    own.stacks.show(state, collected.members.places)
    found: Stacked = own.stacks.of(collected.members.places, own.device)
    return found


def _check_whole(own: Group) -> None:
    """Raise unless every parameter is a plain tensor that lies here as a whole."""
    shards: Sequence[Any] = own.shards or [None] * len(own.group["params"])
    for name, p, shard in zip(own.names, own.group["params"], shards, strict=True):
        if type(p) not in _PLAIN or (shard is not None and shard.over):
            raise TypeError(
                f'`basis` is "eigen", which needs whole and plain tensors; parameter {name!r} is a '
                f"{type(p).__name__} or a shard of one: put it into a group with basis=None"
            )


def as_column(x: Any, like: Tensor) -> Any:
    """A vector with an entry per array of a stack, so that it goes with the stack `like`; numbers as they are."""
    if not isinstance(x, Tensor):
        return x
    column = x.to(like.device) if x.dtype is torch.bool else x.to(like.device, like.dtype)
    return column if x.ndim == 0 else column.view(-1, *[1] * (like.ndim - 1))


def _update(stack: Stack, grads: Tensor, k: Coefficients) -> Tensor:
    """Move m, v and v_max in the basis, as `rule.Coefficients` says; -Δ in the coordinates of the parameters."""
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
    change = m / v_hat.sqrt().add_(k.floor)
    change.mul_(-k.rate)
    if k.limit is not None:
        change = change.clamp(-k.limit, k.limit)
    return rotation.rotated(change, stack.axes, stack.bases, back=True)


def add_to_factors(stack: Stack, grads: Tensor, keep: Tensor, gain: Tensor) -> None:
    """L ← keep·L + (gain·G)(gain·G)ᵀ, of gradients in the coordinates of the parameter; G is not kept."""
    rotation.add_moments(stack.axes, stack.factors, keep.to(grads), grads.mul_(as_column(gain, grads)))


def _replace(stack: Stack, new: Sequence[Tensor], took: Any) -> None:
    """Put what `turning` lists into its place; of those that `took` the gradient, if some did not."""
    for old, changed in zip(stack.turning(), new, strict=True):
        old.copy_(changed if took is None else torch.where(as_column(took, old), changed, old))


def _turn_in_graph(stack: Stack, every: int, took: Any) -> None:
    """Make the basis or turn it, if it is time, in a graph that serves every step."""
    first, due = stack.seen[0] == 0, eigenbasis.is_time_to_turn(stack.seen[0], every)
    _replace(stack, torch.cond(first, lambda: _made(stack), lambda: _turned_if(due, stack)), took)


def _turned_if(due: Tensor, stack: Stack) -> list[Tensor]:
    new: list[Tensor] = torch.cond(due, lambda: _turned(stack), lambda: [x.clone() for x in stack.turning()])
    return new


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
