"""The step of a group with `basis="eigen"`; `kourkoutas.eigenbasis` says what it computes.

All parameters of one shape are worked on together, as a `Stack`. Vectors and scalars are stacks without factors, so one
way of updating serves every parameter, and the number of operations depends on the number of shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas import eigenbasis
from kourkoutas.rule import Coefficients
from kourkoutas.torch import rotation
from kourkoutas.torch.group import Collected, Group
from kourkoutas.torch.lists import NO_FLOAT64, ListStep, norms, real, wide
from kourkoutas.torch.sharding import is_fsdp1

_PLAIN = (Tensor, torch.nn.Parameter)


class Stack(NamedTuple):
    """What is kept of parameters of one shape, along a first axis; of complex ones as pairs of reals.

    All of them have seen as many gradients, so that their basis is made and turns at the same time.

    NOTE: lists and tensors only, because these are what torch.compile lets out of `_init_group`.
    """

    numbers: list[int]  # which parameters, by their numbers in the lists of the step
    m: Tensor
    v: Tensor
    v_max: Any  # None if none is kept
    seen: Tensor  # how many gradients there were before this one; on the CPU, so that nobody waits for a device
    scale: Tensor  # s of `kourkoutas.eigenbasis.factor_weights`
    axes: list[int]  # those that have a factor
    factors: list[Tensor]
    bases: list[Tensor]

    def moments(self) -> list[Tensor]:
        """m, v and v_max, if it is kept."""
        return [self.m, self.v] if self.v_max is None else [self.m, self.v, self.v_max]

    def turning(self) -> list[Tensor]:
        """What changes when the basis turns."""
        return [*self.moments(), *self.bases]


class Stacked(NamedTuple):
    """The stacks of a step."""

    stacks: list[Stack]
    order: Tensor  # the numbers of the parameters in the lists of the step, stack by stack
    back: Tensor  # where each parameter of these lists is, in the order of the stacks


class Shape:
    """The parameters of a group that have one shape, dtype and device: their state, and its views in theirs.

    Attributes:
      places: which parameters, by their numbers in the group.
      axes: those that have a factor.
      kept: name in the state → what is kept under that name, one entry per parameter.
    """

    def __init__(self, group: Group, places: list[int]) -> None:
        self.params = [group.group["params"][i] for i in places]
        self.places = places
        self.like = wide(real(self.params[0].detach()))
        shape = self.like.shape if self.params[0].ndim > 1 else ()
        self.axes = list(eigenbasis.factored_axes(shape, group.hyper.basis_limit))
        self.moment_names = group.moment_names
        self.kept: dict[str, Tensor] = {}
        self.views: dict[str, list[Tensor]] = {}
        self.shown: set[int] = set()  # the rows whose views were put into the state of their parameter

    def show(self, state: Any, rows: list[int]) -> None:
        """Make sure that the states of some parameters show what is kept of them."""
        missing = [row for row in rows if not self._shows(state, row)]
        if not missing:
            return
        if not self.views or not all(self._is_new(state, row) for row in missing):
            self._pack(state)
            missing = [row for row, p in enumerate(self.params) if row in rows or p in state]
        for row in missing:
            state[self.params[row]].update({name: views[row] for name, views in self.views.items()})
        self.shown.update(missing)

    def _shows(self, state: Any, row: int) -> bool:
        entries = state.get(self.params[row], {})
        return bool(self.views) and all(entries.get(name) is views[row] for name, views in self.views.items())

    def _is_new(self, state: Any, row: int) -> bool:
        """Whether nothing was ever kept of a parameter, here or in its state."""
        return row not in self.shown and "exp_avg" not in state.get(self.params[row], {})

    def _pack(self, state: Any) -> None:
        """Keep what the states of the parameters show, and what they would begin with where they show nothing."""
        for name, first in self._first().items():
            values = [self._value(state, p, name, first) for p in self.params]
            self.kept[name] = kept = torch.stack(values)
            shown = kept
            if name in self.moment_names and self.params[0].is_complex():
                shown = torch.view_as_complex(kept)
            self.views[name] = list(shown.unbind())
        self.shown.clear()

    def _first(self) -> dict[str, Tensor]:
        """What one parameter begins with."""
        like = self.like
        first = {name: torch.zeros_like(like, memory_format=torch.contiguous_format) for name in self.moment_names}
        first["seen"] = torch.zeros((), dtype=torch.int64, device="cpu")
        wide_scalars = like.device.type not in NO_FLOAT64
        first["factor_scale"] = like.new_zeros((), dtype=torch.float64 if wide_scalars else torch.float32)
        for axis in self.axes:
            length = like.shape[axis]
            first[f"factor_{axis}"] = like.new_zeros((length, length))
            first[f"basis_{axis}"] = torch.eye(length, dtype=like.dtype, device=like.device)
        return first

    def _value(self, state: Any, p: Tensor, name: str, first: Tensor) -> Tensor:
        """What the state of a parameter shows under a name.

        An Adam's state has moments but no basis. They are right in the coordinates of the parameter, which is the basis
        to begin with, so the parameter goes on from there: it has seen a gradient.
        """
        entries = state.get(p, {})
        if name in entries:
            value = real(torch.as_tensor(entries[name]).detach())
            if value.shape != first.shape:
                raise RuntimeError(
                    f"`{name}` in the state must have the shape {tuple(first.shape)}; got {tuple(value.shape)}: "
                    "load a state that was saved with the same parameters and the same `basis_limit`"
                )
            return value.to(first.device, first.dtype)
        if name == "seen" and "exp_avg" in entries:
            return first + 1
        return first

    def runs(self, rows: list[int]) -> list[list[int]]:
        """Rows, parted where they do not follow each other or have not seen as many gradients."""
        if not rows:
            return []
        seen = self.kept["seen"].tolist()
        runs = [[rows[0]]]
        for row in rows[1:]:
            before = runs[-1][-1]
            if row == before + 1 and seen[row] == seen[before]:
                runs[-1].append(row)
            else:
                runs.append([row])
        return runs

    def stack(self, rows: list[int], numbers: list[int]) -> Stack:
        """What is kept in some rows that follow each other; `numbers` are those of the parameters in the step."""
        whole = len(rows) == len(self.places)

        def some(name: str) -> Tensor:
            return self.kept[name] if whole else self.kept[name].narrow(0, rows[0], len(rows))

        return Stack(
            numbers,
            some("exp_avg"),
            some("exp_avg_sq"),
            some("max_exp_avg_sq") if "max_exp_avg_sq" in self.kept else None,
            some("seen"),
            some("factor_scale"),
            self.axes,
            [some(f"factor_{axis}") for axis in self.axes],
            [some(f"basis_{axis}") for axis in self.axes],
        )


class Stacks:
    """The state of a group with `basis="eigen"`."""

    def __init__(self, group: Group) -> None:
        self._orders: dict[Any, tuple[Tensor, Tensor]] = {}
        kinds: dict[Any, list[int]] = {}
        for i, p in enumerate(group.group["params"]):
            kinds.setdefault((p.shape, p.dtype, p.device), []).append(i)
        self.shapes = [Shape(group, places) for places in kinds.values()]

    def show(self, state: Any, places: Sequence[int]) -> None:
        """Make sure that the states of the parameters at `places` show what is kept."""
        wanted = set(places)
        for shape in self.shapes:
            shape.show(state, [row for row, place in enumerate(shape.places) if place in wanted])

    def of(self, places: Sequence[int], device: torch.device) -> Stacked:
        """What is kept of the parameters at `places`: stacks of neighbours that have seen as many gradients."""
        number_of = {place: number for number, place in enumerate(places)}
        stacks = []
        for shape in self.shapes:
            rows = [row for row, place in enumerate(shape.places) if place in number_of]
            for run in shape.runs(rows):
                stacks.append(shape.stack(run, [number_of[shape.places[row]] for row in run]))
        order = tuple(number for stack in stacks for number in stack.numbers)
        if (order, device) not in self._orders:
            self._orders.clear()
            there = torch.tensor(order, dtype=torch.int64, device=device)
            self._orders[order, device] = there, there.argsort()
        return Stacked(stacks, *self._orders[order, device])


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
    kept = stack.turning()
    first, due = stack.seen[0] == 0, eigenbasis.is_time_to_turn(stack.seen[0], every)
    if torch.compiler.is_compiling():
        new = torch.cond(first, _made, lambda *x: torch.cond(due, _turned, _same, x), (stack,))
    elif first:
        new = _made(stack)
    elif due:
        new = _turned(stack)
    else:
        return
    for old, changed in zip(kept, new, strict=True):
        old.copy_(changed if took is None else torch.where(as_column(took, old), changed, old))


def _made(stack: Stack) -> list[Tensor]:
    """The same with a basis made of the factors."""
    moments = [x.clone() for x in stack.moments()]
    return [*moments, *(rotation.eigenvectors(factor) for factor in stack.factors)]


def _turned(stack: Stack) -> list[Tensor]:
    """The same after one step of orthogonal iteration: m turns with the basis, v keeps its places."""
    m, *others = stack.moments()
    m = rotation.rotated(m, stack.axes, stack.bases, back=True)
    bases = []
    for axis, factor, basis in zip(stack.axes, stack.factors, stack.bases, strict=True):
        turned, order = rotation.turned(factor, basis)
        bases.append(turned)
        others = [rotation.reordered(x, order, axis) for x in others]
    return [rotation.rotated(m, stack.axes, bases), *others, *bases]


def _same(stack: Stack) -> list[Tensor]:
    return [x.clone() for x in stack.turning()]
