"""The eigenbasis for Optax: `in_eigenbasis`, and the pieces that it shares with `kourkoutas_beta(basis="eigen")`.

`kourkoutas.eigenbasis` has the equations. Here the leaves of one shape are worked on together: for each axis that has a
factor there is one array with the factors of all of them, and one with their bases, so that all layers of a kind take
part in one product and in one QR, and the compiled step has as many of these as there are shapes.

NOTE: the basis turns in a branch (`lax.cond`) of the one compiled step. Under `vmap` JAX runs both branches at every
step: right, but slow.
"""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from kourkoutas.eigenbasis import factor_weights, factored_axes, is_time_to_turn
from kourkoutas.optax.arithmetic import as_real, at, from_real, norms, precision, put
from kourkoutas.optax.trees import PyTree, name_of
from kourkoutas.rule import Hyper, check_basis

_DEFAULT = Hyper()
_TURNING = ("mu", "trace")

Leaves = list[Any]  # one entry per parameter; None where there is nothing


def in_eigenbasis(
    inner: optax.GradientTransformation,
    *,
    every: int | jax.Array = _DEFAULT.basis_every,
    memory: float | jax.Array = _DEFAULT.basis_memory,
    limit: int | jax.Array = _DEFAULT.basis_limit,
) -> optax.GradientTransformationExtraArgs:
    r"""Let a transformation work in the eigenbasis of each matrix's gradient factors, as SOAP does with Adam.

    For a matrix with gradient :math:`G_t`:

    .. math::
        G'_t &= Q^T G_t P \\
        U_t &= Q\, \mathrm{inner}(G'_t)\, P^T \\
        L_t &= μ L_{t-1} + (1-μ)\, G_t G_t^T, \quad R_t = μ R_{t-1} + (1-μ)\, G_t^T G_t

    After every few steps the columns of Q are sorted by their eigenvalues diag(QᵀLQ), Q becomes qr(L·Q), and so for P
    and R. `in_eigenbasis(optax.scale_by_adam(b1=0.95, b2=0.95))` is SOAP. More than two axes, complex leaves and long
    axes are as in `kourkoutas.eigenbasis`; leaves of one axis or none are not rotated.

    NOTE: the first call makes the bases, by an eigendecomposition. It moves nothing: its updates are zero, and the
    state of `inner` stays as it is.

    Args:
      inner: a transformation that works on each entry by itself, such as `optax.scale_by_adam`. Whatever its state
        has beside single numbers must be like the parameters. When the basis turns, fields called `mu` or `trace` turn
        with it, as they are first moments; all others keep their places, as second moments must. It gets `params` in
        the basis, too, so `optax.add_decayed_weights` may be part of it.
      every: after how many steps the basis turns, ≥ 1.
      memory: decay μ of the factors L and R, in [0, 1).
      limit: the longest axis that gets a factor, ≥ 1; memory and time grow with its square and its cube.

    Returns:
      The corresponding `optax.GradientTransformationExtraArgs`.

    Example:
      >>> soap = optax.chain(in_eigenbasis(optax.scale_by_adam(b1=0.95, b2=0.95)), optax.scale_by_learning_rate(0.1))
      >>> def f(x): return jnp.sum((x @ jnp.array([[1.0, 2.0], [3.0, 4.0]]) - 1) ** 2)
      >>> params = jnp.ones((2, 2))
      >>> state, update = soap.init(params), jax.jit(soap.update)
      >>> for _ in range(200):
      ...     updates, state = update(jax.grad(f)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(f(params) < 0.01)
      True

    References:
      Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, arXiv 2409.11321, 2024.
    """
    check_basis(every, memory, limit)
    if not isinstance(inner, optax.GradientTransformation):
        raise TypeError(
            f"`inner` must be a gradient transformation, for example optax.scale_by_adam(b1=0.95, b2=0.95); got {inner!r}"
        )
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> InEigenbasisState:
        inner_state = inner.init(params)
        _moments_of(inner, inner_state, params)
        return InEigenbasisState(first_basis(params, limit), inner_state)

    def update_fn(
        updates: optax.Updates, state: InEigenbasisState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, InEigenbasisState]:
        treedef: Any
        gs, treedef = jax.tree.flatten(updates)
        _check_parameters(state.basis, gs)
        bases = Bases(state.basis, gs, gs)
        inside = treedef.unflatten(_cast(bases.enter_gradients(gs), gs))
        if params is not None:
            thetas, of_params = jax.tree.flatten(params)
            params = of_params.unflatten(_cast(bases.enter(thetas), thetas))
        moved, inner_state = inner.update(inside, state.inner_state, params, **extra_args)

        us = jax.tree.leaves(moved)
        starts = state.basis.seen == 0
        first = jnp.any(starts)
        us = [jnp.where(first, jnp.zeros_like(u), u) for u in _cast(bases.leave(us), us)]
        inner_state = jax.tree.map(
            lambda old, new: jnp.where(first, old, new).astype(old.dtype), state.inner_state, inner_state
        )
        moments = _moments_of(inner, inner_state, updates)
        norm = norms(gs, state.basis.scale.dtype)
        basis, moments = bases.after(norm, starts, None, moments, every, memory)
        return treedef.unflatten(us), InEigenbasisState(basis, _with_moments(inner, inner_state, moments))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class Eigenbasis(NamedTuple):
    """What is kept of the bases: a pytree of arrays.

    Attributes:
      seen: how many gradients each parameter has had, skipped ones included, int32, (parameters,).
      scale: s of `kourkoutas.eigenbasis.factor_weights`, (parameters,).
      factors: shape → axis → the factors of all parameters of that shape, (their number, length, length); for
        example `factors["128x3"]["0"]`. A complex parameter has one axis more, of length 2.
      bases: the same for the eigenvectors, which are columns.

    NOTE: for a tree without leaves `factors` and `bases` are empty arrays: `optax.tree.map_params` asks for the state of
    such a tree, and takes what is a leaf there for one number that does not belong to a parameter.
    """

    seen: jax.Array
    scale: jax.Array
    factors: Any
    bases: Any


class InEigenbasisState(NamedTuple):
    """State of `in_eigenbasis`: the bases, and the state of the transformation inside."""

    basis: Eigenbasis
    inner_state: optax.OptState


def first_basis(params: optax.Params, limit: Any) -> Eigenbasis:
    """The state before the first gradient: no factors yet, and the coordinates of the parameters as bases."""
    leaves = jax.tree.leaves(params)
    seen, scale = jnp.zeros(len(leaves), jnp.int32), jnp.zeros(len(leaves), precision(leaves))
    if not leaves:
        return Eigenbasis(seen, scale, jnp.zeros(0), jnp.zeros(0))
    factors: dict[str, dict[str, jax.Array]] = {}
    bases: dict[str, dict[str, jax.Array]] = {}
    for name, numbers in _by_shape(leaves).items():
        dtype, shape = precision(leaves[i] for i in numbers), _real_shape(leaves[numbers[0]])
        for axis in factored_axes(shape, _known(limit)):
            length = shape[axis]
            zeros = jnp.zeros((len(numbers), length, length), dtype)
            factors.setdefault(name, {})[str(axis)] = zeros
            bases.setdefault(name, {})[str(axis)] = zeros + jnp.eye(length, dtype=dtype)
    return Eigenbasis(seen, scale, factors, bases)


def _known(limit: Any) -> int:
    if isinstance(limit, jax.core.Tracer):
        raise ValueError(
            "`basis_limit` decides about shapes and must be known while JAX is tracing: with inject_hyperparams, name "
            'it in static_args=("basis_limit",), or call init() outside of jit'
        )
    return int(limit)


def _real_shape(x: Any) -> tuple[int, ...]:
    """The shape of `as_real(x)`."""
    return (*jnp.shape(x), 2) if jnp.iscomplexobj(x) else jnp.shape(x)


def _by_shape(leaves: Sequence[Any]) -> dict[str, list[int]]:
    """The numbers of the leaves of each shape; those of one axis or none are left out."""
    groups: dict[str, list[int]] = {}
    for i, x in enumerate(leaves):
        if jnp.ndim(x) > 1:
            groups.setdefault("x".join(map(str, _real_shape(x))), []).append(i)
    return groups


class Moment(NamedTuple):
    """A moment of some parameters, by their numbers; first moments turn with the basis, others keep their places."""

    leaves: dict[int, Any]
    turns: bool


class Stack(NamedTuple):
    """What is kept of the parameters of one shape that have a gradient, along a first axis."""

    shape: str  # its name in the state
    numbers: list[int]  # the parameters, by their numbers in the tree
    rows: np.ndarray  # where they are in the arrays of the state
    places: np.ndarray  # where they are among all parameters that have a gradient
    axes: list[int]  # those that have a factor
    factors: list[jax.Array]
    bases: list[jax.Array]

    def join(self, xs: Any, numbers: Sequence[int]) -> jax.Array:
        """The arrays of some parameters as one, real, in the dtype of the basis."""
        return jnp.stack([as_real(xs[i]).astype(self.bases[0].dtype) for i in numbers])


class Bases:
    """The bases of the parameters that have a gradient, in one step.

    Args:
      kept: the state before the step.
      like: an array for each parameter, with its shape, complex where it is.
      gs: the gradients, like these; None where there is none.
    """

    def __init__(self, kept: Eigenbasis, like: Sequence[Any], gs: Sequence[Any]) -> None:
        self.kept = kept
        self.here = np.asarray([i for i, g in enumerate(gs) if g is not None], np.int32)
        self.stacks = list(self._stacks(like))
        self.grads = [stack.join(gs, stack.numbers) for stack in self.stacks]

    def _stacks(self, like: Sequence[Any]) -> Iterator[Stack]:
        place_of = {int(number): place for place, number in enumerate(self.here)}
        for name, numbers in _by_shape(like).items():
            if name not in self.kept.factors:
                continue
            rows = np.asarray([row for row, i in enumerate(numbers) if i in place_of], np.int32)
            if not len(rows):
                continue
            chosen = [numbers[row] for row in rows]
            places = np.asarray([place_of[i] for i in chosen], np.int32)
            factors, bases = self.kept.factors[name], self.kept.bases[name]
            axes = list(factors)
            yield Stack(
                name,
                chosen,
                rows,
                places,
                [int(axis) for axis in axes],
                [at(factors[axis], rows) for axis in axes],
                [at(bases[axis], rows) for axis in axes],
            )

    def enter(self, xs: Sequence[Any]) -> Leaves:
        """`xs`, a leaf per parameter, in the bases; what is rotated is float32 at least."""
        return self._rotated(xs, [stack.join(xs, stack.numbers) for stack in self.stacks], back=False)

    def enter_gradients(self, gs: Sequence[Any]) -> Leaves:
        """The same for the gradients."""
        return self._rotated(gs, self.grads, back=False)

    def leave(self, xs: Sequence[Any]) -> Leaves:
        """The way back."""
        return self._rotated(xs, [stack.join(xs, stack.numbers) for stack in self.stacks], back=True)

    def _rotated(self, xs: Sequence[Any], joined: Sequence[jax.Array], back: bool) -> Leaves:
        out = list(xs)
        for stack, x in zip(self.stacks, joined, strict=True):
            rows = jnp.unstack(_rotate(x, stack.axes, stack.bases, back))
            for i, row in zip(stack.numbers, rows, strict=True):
                out[i] = from_real(row, jnp.result_type(xs[i])) if jnp.iscomplexobj(xs[i]) else row
        return out

    def after(
        self,
        norm: jax.Array,
        starts: jax.Array,
        taken: jax.Array | None,
        moments: Sequence[Moment],
        every: Any,
        memory: Any,
    ) -> tuple[Eigenbasis, list[Moment]]:
        """The state and the moments after the step, in which the bases may turn.

        Args:
          norm: ||g|| of each parameter that has a gradient; of these are the next two, too.
          starts: which of them have their first gradient.
          taken: which gradients are not skipped; None: all.
          moments: m and the like, in the bases before the step.
          every: after how many gradients a basis turns.
          memory: μ.
        """
        seen, old_scale = at(self.kept.seen, self.here), at(self.kept.scale, self.here)
        keep, gain, scale = factor_weights(memory, norm.astype(old_scale.dtype), old_scale, jnp)
        due = is_time_to_turn(seen, every)
        if taken is not None:
            starts, due, scale = starts & taken, due & taken, jnp.where(taken, scale, old_scale)

        moments = list(moments)
        factors, bases = dict(self.kept.factors), dict(self.kept.bases)
        has_factors = np.zeros(len(self.here), bool)
        for stack, g in zip(self.stacks, self.grads, strict=True):
            has_factors[stack.places] = True
            took = None if taken is None else at(taken, stack.places)
            grown = _with_gradient(stack, g, at(keep, stack.places), at(gain, stack.places), took)
            own = [_some(moment, stack.numbers) for moment in moments]
            turned, own = _changed(grown, at(starts, stack.places), at(due, stack.places), own)
            moments = [Moment({**all_.leaves, **new.leaves}, all_.turns) for all_, new in zip(moments, own, strict=True)]
            factors[stack.shape] = _put_back(factors[stack.shape], stack, grown.factors)
            bases[stack.shape] = _put_back(bases[stack.shape], stack, turned)
        scale = jnp.where(has_factors, scale, old_scale)
        seen = jnp.minimum(seen, np.iinfo(np.int32).max - 1) + 1
        seen, scale = put(self.kept.seen, self.here, seen), put(self.kept.scale, self.here, scale)
        if not len(self.kept.seen):
            return self.kept, moments
        return Eigenbasis(seen, scale, factors, bases), moments


def _put_back(kept: dict[str, jax.Array], stack: Stack, new: Sequence[jax.Array]) -> dict[str, jax.Array]:
    pairs = zip(stack.axes, new, strict=True)
    return {str(axis): put(kept[str(axis)], stack.rows, x) for axis, x in pairs}


def _some(moment: Moment, numbers: Sequence[int]) -> Moment:
    return moment._replace(leaves={i: moment.leaves[i] for i in numbers if i in moment.leaves})


def _with_gradient(stack: Stack, g: jax.Array, keep: jax.Array, gain: jax.Array, taken: Any) -> Stack:
    """L ← keep·L + (gain·G)·(gain·G)ᵀ along every axis that has a factor."""
    x = g * _column(gain, g)
    factors = []
    for axis, factor in zip(stack.axes, stack.factors, strict=True):
        rest = [i + 1 for i in range(g.ndim - 1) if i != axis]
        moments = lax.dot_general(x, x, ((rest, rest), ([0], [0])), precision=lax.Precision.HIGHEST)
        new = _column(keep, factor) * factor + moments
        factors.append(new if taken is None else jnp.where(_column(taken, factor), new, factor))
    return stack._replace(factors=factors)


def _changed(
    stack: Stack, starts: jax.Array, due: jax.Array, moments: list[Moment]
) -> tuple[list[jax.Array], list[Moment]]:
    """The bases and moments of a stack after the bases that `starts` were made, and those that are `due` turned."""
    leaves = [moment.leaves for moment in moments]

    def make_and_turn() -> Any:
        made = _when(jnp.any(starts), lambda: _made(stack, starts), lambda: stack.bases)
        return _when(jnp.any(due), lambda: _turned(stack._replace(bases=made), due, moments), lambda: (made, leaves))

    bases, leaves = _when(jnp.any(starts | due), make_and_turn, lambda: (stack.bases, leaves))
    return bases, [moment._replace(leaves=new) for moment, new in zip(moments, leaves, strict=True)]


def _when(condition: jax.Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`lax.cond`; outside of jit, where that would compile both branches at every step, Python's own."""
    if isinstance(condition, jax.core.Tracer):
        return lax.cond(condition, then, otherwise)
    return then() if condition else otherwise()


def _made(stack: Stack, starts: jax.Array) -> list[jax.Array]:
    """The bases, with the eigenvectors of the factors, those of the largest eigenvalue first, where one `starts`."""
    new = [jnp.linalg.eigh(factor)[1][..., ::-1] for factor in stack.factors]
    return [jnp.where(_column(starts, q), made, q) for made, q in zip(new, stack.bases, strict=True)]


def _turned(stack: Stack, due: jax.Array, moments: Sequence[Moment]) -> tuple[list[jax.Array], list[dict[int, Any]]]:
    """The bases and the moments after one step of orthogonal iteration, where it is `due`."""
    bases, orders = [], []
    for factor, q in zip(stack.factors, stack.bases, strict=True):
        product = jnp.matmul(factor, q, precision=lax.Precision.HIGHEST)
        # The eigenvalues as far as the basis knows them, diag(Qᵀ·L·Q), largest first
        order = jnp.argsort(-jnp.sum(q * product, 1), axis=1, stable=True)
        orders.append(jnp.where(due[:, None], order, jnp.arange(order.shape[1])))
        # Q ← qr(L·Q)
        new = jnp.linalg.qr(jnp.take_along_axis(product, order[:, None, :], 2))[0]
        bases.append(jnp.where(_column(due, q), new, q))

    changed = []
    for leaves, turns in moments:
        rows = np.asarray([row for row, i in enumerate(stack.numbers) if i in leaves], np.int32)
        if not len(rows):
            changed.append(leaves)
            continue
        x = stack.join(leaves, list(leaves))
        if turns:
            new = _rotate(x, stack.axes, [at(q, rows) for q in stack.bases], back=True)
            new = _rotate(new, stack.axes, [at(q, rows) for q in bases])
            new = jnp.where(_column(at(due, rows), x), new, x)
        else:
            new = _reordered(x, stack.axes, [at(order, rows) for order in orders])
        pairs = zip(leaves.items(), jnp.unstack(new), strict=True)
        changed.append({i: from_real(row, old.dtype) for (i, old), row in pairs})
    return bases, changed


def _rotate(x: jax.Array, axes: Sequence[int], bases: Sequence[jax.Array], back: bool = False) -> jax.Array:
    """Qᵀ·x·P of each matrix, and the same along the axes of other arrays; Q·x·Pᵀ on the way `back`."""
    for axis, q in zip(axes, bases, strict=True):
        side = 2 if back else 1
        if axis == 0:
            x = lax.dot_general(q, x, (([side], [1]), ([0], [0])), precision=lax.Precision.HIGHEST)
        else:
            x = lax.dot_general(x, q, (([axis + 1], [side]), ([0], [0])), precision=lax.Precision.HIGHEST)
            x = jnp.moveaxis(x, -1, axis + 1)
    return x


def _reordered(x: jax.Array, axes: Sequence[int], orders: Sequence[jax.Array]) -> jax.Array:
    """The entries along some axes in another order, which each array has for itself."""
    index: list[Any] = [_along(jnp.arange(length), i, x.ndim) for i, length in enumerate(x.shape)]
    for axis, order in zip(axes, orders, strict=True):
        index[axis + 1] = jnp.expand_dims(order, [i for i in range(x.ndim) if i not in (0, axis + 1)])
    return x[tuple(index)]


def _along(x: jax.Array, axis: int, ndim: int) -> jax.Array:
    return jnp.expand_dims(x, [i for i in range(ndim) if i != axis])


def _column(x: jax.Array, like: jax.Array) -> jax.Array:
    """A vector with an entry per array of a stack, to go with a stack; numbers in its dtype."""
    x = x if x.dtype == bool else x.astype(like.dtype)
    return _along(x, 0, like.ndim)


def _cast(xs: Sequence[Any], like: Sequence[Any]) -> Leaves:
    """Each of `xs` with the dtype of its twin."""
    return [jnp.asarray(x, jnp.result_type(y)) for x, y in zip(xs, like, strict=True)]


class _Marked(NamedTuple):
    """A leaf of a state that belongs to a parameter."""

    value: Any


def _is_marked(x: Any) -> bool:
    return isinstance(x, _Marked)


def _marked(inner: optax.GradientTransformation, state: optax.OptState) -> tuple[list[Any], Any]:
    """The leaves of the state of `inner` with their paths, those that belong to a parameter marked, and the treedef."""
    marked = optax.tree_utils.tree_map_params(inner, _Marked, state)
    found: tuple[list[Any], Any] = jax.tree_util.tree_flatten_with_path(marked, is_leaf=_is_marked)
    return found


def _moments_of(inner: optax.GradientTransformation, state: optax.OptState, like: PyTree) -> list[Moment]:
    """The fields of the state of `inner` that are like the parameters, in its order."""
    arrays = jax.tree_util.tree_leaves_with_path(like)
    moments: dict[Any, Moment] = {}
    for path, leaf in _marked(inner, state)[0]:
        if not _is_marked(leaf):
            continue
        # A leaf's path is that of the field, and then that of its parameter.
        number = max(
            (i for i, (own, _) in enumerate(arrays) if path[len(path) - len(own) :] == own),
            key=lambda i: len(arrays[i][0]),
        )
        own, array = arrays[number]
        field = path[: len(path) - len(own)]
        if jnp.shape(leaf.value) != jnp.shape(array):
            raise ValueError(
                f"`inner` keeps {name_of(field)!r} of shape {jnp.shape(leaf.value)} for the parameter {name_of(own)!r} "
                f"of shape {jnp.shape(array)}: give in_eigenbasis a transformation that works on each entry by itself, "
                "such as optax.scale_by_adam"
            )
        turns = any(name_of([key]) in _TURNING for key in field[-1:])
        moments.setdefault(field, Moment({}, turns)).leaves[number] = leaf.value
    return list(moments.values())


def _with_moments(
    inner: optax.GradientTransformation, state: optax.OptState, moments: Sequence[Moment]
) -> optax.OptState:
    """The state of `inner` with other moments, in the order of `_moments_of`."""
    leaves, treedef = _marked(inner, state)
    new = iter([x for moment in moments for x in moment.leaves.values()])
    return treedef.unflatten([next(new) if _is_marked(leaf) else leaf for _, leaf in leaves])


def _check_parameters(basis: Eigenbasis, gs: Sequence[Any]) -> None:
    if len(gs) != len(basis.seen):
        raise ValueError(
            f"the state has the bases of {len(basis.seen)} parameters, and the updates have {len(gs)} arrays: call "
            "init() with the same tree, and give zeros where a gradient is missing"
        )
