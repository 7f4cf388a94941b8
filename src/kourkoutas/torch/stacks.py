"""What `basis="eigen"` keeps of parameters, in stacks: all parameters of one shape, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas import eigenbasis
from kourkoutas.torch.lists import NO_FLOAT64, real, wide


class Stack(NamedTuple):
    """What is kept of parameters of one shape, along a first axis; of complex ones as pairs of reals.

    All of them have seen as many gradients, so that their basis is made and turns at the same time.
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

    # NOTE: torch.compile lets tensors and constants out of `_init_group` in lists of their own, and nothing nested.

    def flat(self) -> tuple[list[Tensor], list[Any]]:
        """All tensors, and what else it takes to make the same of them again."""
        tensors = [self.order, self.back]
        outlines = []
        for stack in self.stacks:
            tensors += [stack.seen, stack.scale, *stack.moments(), *stack.factors, *stack.bases]
            outlines.append((stack.numbers, stack.axes, stack.v_max is not None))
        return tensors, outlines

    @classmethod
    def unflattened(cls, tensors: list[Tensor], outlines: list[Any]) -> Stacked:
        """The reverse of `flat`."""
        order, back, *rest = tensors
        stacks = []
        for numbers, axes, has_v_max in outlines:
            seen, scale, m, v, *rest = rest
            v_max = None
            if has_v_max:
                v_max, *rest = rest
            count = len(axes)
            factors, bases, rest = rest[:count], rest[count : 2 * count], rest[2 * count :]
            stacks.append(Stack(numbers, m, v, v_max, seen, scale, axes, factors, bases))
        return cls(stacks, order, back)


class Shape:
    """The parameters of a group that have one shape, dtype and device: their state, and its views in theirs.

    Attributes:
      places: which parameters, by their numbers in the group.
      axes: those that have a factor.
      kept: name in the state → what is kept under that name, one entry per parameter.
    """

    def __init__(self, places: list[int], params: list[Tensor], limit: int, moment_names: Sequence[str]) -> None:
        self.places, self.params, self.moment_names = places, params, moment_names
        self.like = wide(real(params[0].detach()))
        shape = self.like.shape if params[0].ndim > 1 else ()
        self.axes = list(eigenbasis.factored_axes(shape, limit))
        self.kept: dict[str, Tensor] = {}
        self.views: list[dict[str, Tensor]] = []  # for each parameter, what its state shows
        self.shown: set[int] = set()  # the rows whose views were put into the state of their parameter

    def show(self, state: Any, rows: list[int]) -> bool:
        """Make sure that the states of some parameters show what is kept of them; whether it is packed anew."""
        missing = [row for row in rows if not self._shows(state, row)]
        if not missing:
            return False
        packs = not self.views or not all(self._is_new(state, row) for row in missing)
        if packs:
            self._pack(state)
            missing = [row for row, p in enumerate(self.params) if row in rows or p in state]
        for row in missing:
            state[self.params[row]].update(self.views[row])
        self.shown.update(missing)
        return packs

    def _shows(self, state: Any, row: int) -> bool:
        entries = state.get(self.params[row])
        if not self.views or entries is None:
            return False
        views = self.views[row]
        return all(map(is_, map(entries.get, views), views.values()))

    def _is_new(self, state: Any, row: int) -> bool:
        """Whether nothing was ever kept of a parameter, here or in its state."""
        return row not in self.shown and "exp_avg" not in state.get(self.params[row], {})

    def _pack(self, state: Any) -> None:
        """Keep what the states of the parameters show, and what they would begin with where they show nothing."""
        self.views = [{} for _ in self.params]
        for name, first in self._first().items():
            values = [self._value(state, p, name, first) for p in self.params]
            self.kept[name] = kept = torch.stack(values)
            if name in self.moment_names and self.params[0].is_complex():
                kept = torch.view_as_complex(kept)
            for views, view in zip(self.views, kept.unbind(), strict=True):
                views[name] = view
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
    """What a group with `basis="eigen"` keeps of its parameters, beside the scalars that every group keeps.

    NOTE: as with these, the state of a parameter shows views, and anybody may put another tensor in the place of one.
    """

    def __init__(self, params: Sequence[Tensor], limit: int, moment_names: Sequence[str]) -> None:
        self.made_for = self.key(params, limit, moment_names)
        self._latest: Stacked | None = None  # the stacks of the last step
        self._latest_of: Any = None  # the places and the device they were for
        self.plans: Any = None  # of the last step, if it was `kourkoutas.torch.eigenbasis_kernel`'s
        kinds: dict[Any, list[int]] = {}
        for i, p in enumerate(params):
            kinds.setdefault((p.shape, p.dtype, p.device), []).append(i)
        self.shapes = [Shape(places, [params[i] for i in places], limit, moment_names) for places in kinds.values()]

    @staticmethod
    def key(params: Sequence[Tensor], limit: int, moment_names: Sequence[str]) -> Any:
        """What the stacks follow from; other ones are needed when it changes."""
        return [(p.shape, p.dtype, p.device) for p in params], limit, moment_names

    def show(self, state: Any, places: Sequence[int]) -> None:
        """Make sure that the states of the parameters at `places` show what is kept."""
        wanted = set(places)
        for shape in self.shapes:
            if shape.show(state, [row for row, place in enumerate(shape.places) if place in wanted]):
                self._latest = None

    def of(self, places: Sequence[int], device: torch.device) -> Stacked:
        """What is kept of the parameters at `places`: stacks of neighbours that have seen as many gradients.

        As long as the same parameters step, they go on to have seen as many as each other.
        """
        if self._latest is None or self._latest_of != (places, device):
            self._latest_of = list(places), device
            self._latest = self._stacked(places, device)
            self.plans = None
        return self._latest

    def _stacked(self, places: Sequence[int], device: torch.device) -> Stacked:
        number_of = {place: number for number, place in enumerate(places)}
        stacks = []
        for shape in self.shapes:
            rows = [row for row, place in enumerate(shape.places) if place in number_of]
            for run in shape.runs(rows):
                stacks.append(shape.stack(run, [number_of[shape.places[row]] for row in run]))
        order = [number for stack in stacks for number in stack.numbers]
        there = torch.tensor(order, dtype=torch.int64, device=device)
        return Stacked(stacks, there, there.argsort())
