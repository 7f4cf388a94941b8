"""The eigenbasis for Optax: `in_eigenbasis`, and the pieces that it shares with `kourkoutas_beta(basis="eigen")`.

`kourkoutas.eigenbasis` has the equations. Here the leaves of one shape are worked on together, as a `Stack`: one array
that has them along its first axis, and for each axis that has a factor one array with all their factors and one with
all their bases. So all layers of a kind take part in one product and in one QR, and what has to be compiled depends on
the number of shapes only. Leaves of one axis or none are stacks without factors.

NOTE: the basis turns in a branch (`lax.cond`) of the one compiled step. Under `vmap` JAX runs both branches at every
step: right, but slow.

NOTE: on the CPU JAX takes its QR from SciPy's OpenBLAS, whose threads get into the way of JAX's own. Set
OPENBLAS_NUM_THREADS=1 before Python starts, or a turn may take a hundred times as long.
"""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from kourkoutas.eigenbasis import factor_weights, factored_axes, is_time_to_turn
from kourkoutas.optax.arithmetic import as_real, at, from_real, in_order, precision, put
from kourkoutas.optax.trees import name_of
from kourkoutas.rule import Hyper, check_basis

_DEFAULT = Hyper()
_TURNING = ("mu", "trace")


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
      inner: a transformation that works on each entry by itself, such as `optax.scale_by_adam`. It gets all leaves of
        one shape as one real array, the same of `params` (so `optax.add_decayed_weights` may be part of it), and its
        state is made of such arrays. When the basis turns, those in fields called `mu` or `trace` turn with it, as they
        are first moments; all others keep their places, as second moments must. Masks and labels by name belong around
        `in_eigenbasis`, not into it.
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
            f"`inner` must be a gradient transformation; got {inner!r}: give, for example, "
            "optax.scale_by_adam(b1=0.95, b2=0.95)"
        )
    inner = optax.with_extra_args_support(inner)

    def init_fn(params: optax.Params) -> InEigenbasisState:
        basis, leaves = first_basis(params, limit), jax.tree.leaves(params)
        # An array instead of no arrays, for the reason that `Eigenbasis` gives.
        if not leaves:
            return InEigenbasisState(basis, inner.init(jnp.zeros(0)))
        inside = {stack.shape: stack.join(leaves) for stack in stacks_of(basis, leaves)}
        inner_state = inner.init(inside)
        _moments_of(inner, inner_state, inside)
        return InEigenbasisState(basis, inner_state)

    def update_fn(
        updates: optax.Updates, state: InEigenbasisState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, InEigenbasisState]:
        treedef: Any
        gs, treedef = jax.tree.flatten(updates)
        _check_number(state.basis, gs)
        if not gs:
            return updates, state
        grads = stacked(state.basis, gs, gs)
        stacks = grads.stacks
        inside = {stack.shape: stack.enter(grads.of_shape[stack.shape]) for stack in stacks}
        if params is not None:
            thetas = jax.tree.leaves(params)
            params = {stack.shape: stack.enter(stack.join(thetas)) for stack in stacks}
        moved, inner_state = inner.update(inside, state.inner_state, params, **extra_args)

        starts = state.basis.seen == 0
        first = jnp.any(starts)
        inner_state = jax.tree.map(lambda old, new: jnp.where(first, old, new), state.inner_state, inner_state)
        us: dict[int, jax.Array] = {}
        for stack in stacks:
            u = moved[stack.shape]
            us.update(stack.part(jnp.where(first, jnp.zeros_like(u), stack.leave(u)), gs))
        moments = _moments_of(inner, inner_state, inside)
        basis, moments = advanced(state.basis, grads, starts, None, moments, every, memory)
        return treedef.unflatten([us[i] for i in range(len(gs))]), InEigenbasisState(
            basis, _with_moments(inner, inner_state, moments)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_number(basis: "Eigenbasis", gs: Sequence[Any]) -> None:
    if len(gs) != len(basis.seen):
        raise ValueError(
            f"the state has the bases of {len(basis.seen)} parameters, and the updates have {len(gs)} arrays: call "
            "init() with the same tree, and give zeros where a gradient is missing"
        )


class Eigenbasis(NamedTuple):
    """What is kept of the bases: a pytree of arrays.

    Attributes:
      seen: how many gradients each parameter has had, skipped ones included, int32, (parameters,).
      scale: s of `kourkoutas.eigenbasis.factor_weights`, (parameters,).
      factors: shape → axis → the factors of all parameters of that shape, (their number, length, length); for
        example `factors["128x3"]["0"]`, or `["128x3c"]` of complex ones, which have one axis more, of length 2.
      bases: the same for the eigenvectors, which are columns.

    NOTE: for a tree without leaves `factors` and `bases` are empty arrays. `optax.tree.map_params` asks for the state
    of such a tree, and needs something in the place of what does not belong to single parameters.
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
        dtype, one = precision(leaves[i] for i in numbers), leaves[numbers[0]]
        shape = (*jnp.shape(one), 2) if jnp.iscomplexobj(one) else jnp.shape(one)
        for axis in factored_axes(shape, _known(limit)) if jnp.ndim(one) > 1 else ():
            zeros = jnp.zeros((len(numbers), shape[axis], shape[axis]), dtype)
            factors.setdefault(name, {})[str(axis)] = zeros
            bases.setdefault(name, {})[str(axis)] = zeros + jnp.eye(shape[axis], dtype=dtype)
    return Eigenbasis(seen, scale, factors, bases)


def _known(limit: Any) -> int:
    if isinstance(limit, jax.core.Tracer):
        raise ValueError(
            "`basis_limit` decides about shapes and must be known while JAX is tracing: with inject_hyperparams, name "
            'it in static_args=("basis_limit",), or call init() outside of jit'
        )
    return int(limit)


def _by_shape(leaves: Sequence[Any]) -> dict[str, list[int]]:
    """The numbers of the leaves of each shape, by its name."""
    groups: dict[str, list[int]] = {}
    for i, x in enumerate(leaves):
        name = "x".join(map(str, jnp.shape(x))) or "scalar"
        groups.setdefault(name + "c" * jnp.iscomplexobj(x), []).append(i)
    return groups


class Stack(NamedTuple):
    """The parameters of one shape that have a gradient, and what is kept of their bases, along a first axis."""

    shape: str  # its name in the state
    numbers: list[int]  # the parameters, by their numbers in the tree
    rows: np.ndarray  # where they are in the arrays of the state
    places: np.ndarray  # where they are among all parameters that have a gradient
    axes: list[int]  # those that have a factor
    factors: list[jax.Array]
    bases: list[jax.Array]

    def join(self, xs: Any) -> jax.Array:
        """The parameters' leaves of `xs`, a leaf per parameter of the tree, as one real array."""
        arrays = [jnp.asarray(xs[i]) for i in self.numbers]
        if jnp.iscomplexobj(arrays[0]):
            arrays = [as_real(x) for x in arrays]
        return jnp.stack(arrays)

    def part(self, x: jax.Array, like: Any) -> dict[int, jax.Array]:
        """The other way round: the leaves of `x` by number, with the dtypes of those of `like`."""
        rows = zip(self.numbers, jnp.unstack(x), strict=True)
        return {i: from_real(row, jnp.result_type(like[i])) for i, row in rows}

    def enter(self, x: jax.Array) -> jax.Array:
        """`x` in the bases."""
        return _rotate(x, self.axes, self.bases)

    def leave(self, x: jax.Array) -> jax.Array:
        """The way back."""
        return _rotate(x, self.axes, self.bases, back=True)


def stacks_of(basis: Eigenbasis, like: Sequence[Any], here: Sequence[int] | None = None) -> list[Stack]:
    """The stacks of a step.

    Args:
      basis: the state before the step.
      like: an array for each parameter, with its shape, complex where it is.
      here: the numbers of the parameters that have a gradient; None: all.
    """
    numbers = range(len(like)) if here is None else [int(i) for i in here]
    return list(_stacks(basis, like, {number: place for place, number in enumerate(numbers)}))


def _stacks(basis: Eigenbasis, like: Sequence[Any], place_of: Mapping[int, int]) -> Iterator[Stack]:
    for name, numbers in _by_shape(like).items():
        rows = np.asarray([row for row, i in enumerate(numbers) if i in place_of], np.int32)
        if not len(rows):
            continue
        chosen = [numbers[row] for row in rows]
        factors, bases = basis.factors.get(name, {}), basis.bases.get(name, {})
        yield Stack(
            shape=name,
            numbers=chosen,
            rows=rows,
            places=np.asarray([place_of[i] for i in chosen], np.int32),
            axes=[int(axis) for axis in factors],
            factors=[at(x, rows) for x in factors.values()],
            bases=[at(bases[axis], rows) for axis in factors],
        )


class Gradients(NamedTuple):
    """The gradients of a step, by shape, in the coordinates of the parameters."""

    stacks: list[Stack]
    of_shape: dict[str, jax.Array]
    norm: jax.Array  # ||g|| of each parameter that has a gradient


def stacked(basis: Eigenbasis, like: Sequence[Any], gs: Sequence[Any]) -> Gradients:
    """Gradients, None where there is none, by shape; `like` has an array for each parameter, as in `stacks_of`."""
    stacks = stacks_of(basis, like, [i for i, g in enumerate(gs) if g is not None])
    of_shape = {stack.shape: stack.join(gs) for stack in stacks}
    return Gradients(stacks, of_shape, _norms(stacks, of_shape, basis.scale.dtype))


def _norms(stacks: Sequence[Stack], of_shape: Mapping[str, jax.Array], dtype: Any) -> jax.Array:
    """||g|| of each parameter.

    NOTE: Σg² may overflow or underflow where its root does not. In a branch that is hardly ever taken the norms are
    therefore u·√Σ(g/u)², with u the largest |g|. Unlike n of a bucket, these must be right when they are tiny, too.
    """
    places = [stack.places.tolist() for stack in stacks]
    arrays = [of_shape[stack.shape].astype(dtype) for stack in stacks]

    def squares(xs: Sequence[jax.Array]) -> jax.Array:
        return in_order([jnp.sum(x * x, range(1, x.ndim)) for x in xs], places, dtype)

    def guarded() -> jax.Array:
        largest = [jnp.max(jnp.abs(x), range(1, x.ndim), initial=0) for x in arrays]
        units = [jnp.where((u > 0) & jnp.isfinite(u), u, 1) for u in largest]
        scaled = [x / column(u, x) for x, u in zip(arrays, units, strict=True)]
        return in_order(units, places, dtype) * jnp.sqrt(squares(scaled))

    total = squares(arrays)
    is_safe = jnp.isfinite(total) & (total > jnp.finfo(dtype).tiny / jnp.finfo(dtype).eps)
    norm: jax.Array = _when(jnp.all(is_safe), lambda: jnp.sqrt(total), guarded)
    return norm


class Moment(NamedTuple):
    """One moment of all parameters, by shape; first moments turn with the basis, others keep their places."""

    of_shape: dict[str, Any]
    turns: bool


def advanced(
    basis: Eigenbasis,
    grads: Gradients,
    starts: jax.Array,
    taken: jax.Array | None,
    moments: Sequence[Moment],
    every: Any,
    memory: Any,
) -> tuple[Eigenbasis, list[Moment]]:
    """The state and the moments after a step: factors have the gradient in them, and bases may have turned.

    Args:
      basis: the state before the step.
      grads: of the parameters that have one.
      starts: which of these have their first.
      taken: which of these are not skipped; None: all.
      moments: in the bases before the step.
      every: after how many gradients a basis turns.
      memory: μ.
    """
    stacks = grads.stacks
    if not stacks:
        return basis, list(moments)
    here = np.sort(np.asarray([i for stack in stacks for i in stack.numbers], np.int32))
    seen, scale = at(basis.seen, here), at(basis.scale, here)
    keep, gain, new_scale = factor_weights(memory, grads.norm, scale, jnp)
    due = is_time_to_turn(seen, every)
    counts = np.zeros(len(here), bool)
    for stack in stacks:
        counts[stack.places] = bool(stack.axes)
    if taken is None:
        new_scale = jnp.where(counts, new_scale, scale)
    else:
        starts, due, new_scale = starts & taken, due & taken, jnp.where(taken & counts, new_scale, scale)

    factors, bases = dict(basis.factors), dict(basis.bases)
    changed = [dict(moment.of_shape) for moment in moments]
    earlier = None
    for stack in stacks:
        if not stack.axes:
            continue
        name, places = stack.shape, stack.places
        took = None if taken is None else at(taken, places)
        stack = _with_gradient(stack, grads.of_shape[name], at(keep, places), at(gain, places), took)
        old = [(moment.of_shape[name], moment.turns) for moment in moments]
        turned, new = _turned_if_due(stack, at(starts, places), at(due, places), old, earlier)
        earlier = turned[-1]
        for of_shape, x in zip(changed, new, strict=True):
            of_shape[name] = x
        factors[name] = _put_back(factors[name], stack, stack.factors)
        bases[name] = _put_back(bases[name], stack, turned)
    seen = jnp.minimum(seen, np.iinfo(np.int32).max - 1) + 1
    new_basis = Eigenbasis(put(basis.seen, here, seen), put(basis.scale, here, new_scale), factors, bases)
    return new_basis, [Moment(of_shape, moment.turns) for of_shape, moment in zip(changed, moments, strict=True)]


def _put_back(kept: dict[str, jax.Array], stack: Stack, new: Sequence[jax.Array]) -> dict[str, jax.Array]:
    return {str(axis): put(kept[str(axis)], stack.rows, x) for axis, x in zip(stack.axes, new, strict=True)}


def _with_gradient(stack: Stack, g: jax.Array, keep: jax.Array, gain: jax.Array, taken: Any) -> Stack:
    """L ← keep·L + (gain·G)·(gain·G)ᵀ along every axis that has a factor."""
    x = g.astype(stack.factors[0].dtype)
    x = x * column(gain, x)
    factors = []
    for axis, factor in zip(stack.axes, stack.factors, strict=True):
        rest = [i + 1 for i in range(x.ndim - 1) if i != axis]
        new = column(keep, factor) * factor + _product(x, x, rest, rest)
        factors.append(new if taken is None else jnp.where(column(taken, factor), new, factor))
    return stack._replace(factors=factors)


def _turned_if_due(
    stack: Stack, starts: jax.Array, due: jax.Array, moments: Sequence[tuple[jax.Array, bool]], earlier: Any
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The bases and moments of a stack after the bases that `starts` were made, and those that are `due` turned.

    `moments` are pairs: an array, and whether it turns with the basis. `earlier` is as in `_after`.
    """
    arrays = [x for x, _ in moments]

    def make_and_turn() -> Any:
        made = _when(jnp.any(starts), lambda: _made(stack, starts, earlier), lambda: stack.bases)
        turn = functools.partial(_turned, stack._replace(bases=made), due, moments, made[-1])
        return _when(jnp.any(due), turn, lambda: (made, arrays))

    changed: tuple[list[jax.Array], list[jax.Array]] = _when(
        jnp.any(starts | due), make_and_turn, lambda: (stack.bases, arrays)
    )
    return changed


def _when(condition: jax.Array, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """`lax.cond`; outside of jit, where that would compile both branches at every step, Python's own."""
    if isinstance(condition, jax.core.Tracer):
        return lax.cond(condition, then, otherwise)
    return then() if condition else otherwise()


def _made(stack: Stack, starts: jax.Array, earlier: Any) -> list[jax.Array]:
    """The bases, with the eigenvectors of the factors, those of the largest eigenvalue first, where one `starts`."""
    bases = []
    for factor, q in zip(stack.factors, stack.bases, strict=True):
        made = _eigenvectors(_after(earlier, factor))
        earlier = jnp.where(column(starts, q), made, q)
        bases.append(earlier)
    return bases


def _after(earlier: Any, x: jax.Array) -> jax.Array:
    """x, as soon as the basis `earlier` is there, which may be None.

    NOTE: JAX on the CPU hands the matrices of one QR to its pool of threads, and waits for them on one of these. If as
    many QRs begin at once as there are threads, two on two cores, each waits for the other, and the program stands
    still. So each begins when the one before is done; the same holds for eigendecompositions. XLA drops a dependence
    that it can see through (`lax.optimization_barrier`); it does not know that no entry of a basis is larger than 1.
    """
    return x if earlier is None else jnp.where(earlier.ravel()[0] > 2, 0, x)


def _eigenvectors(factor: jax.Array) -> jax.Array:
    """Those of the largest eigenvalue first.

    NOTE: in float32 an eigendecomposition may not converge, as libraries show on the gradients of embeddings, and JAX
    then gives NaNs. One step of orthogonal iteration always gives a basis, and turns make it a better one.
    """
    vectors = jnp.linalg.eigh(factor)[1][..., ::-1]
    converged = jnp.all(jnp.isfinite(vectors), axis=(1, 2), keepdims=True)
    return jnp.where(converged, vectors, jnp.linalg.qr(_after(vectors, factor))[0])


def _turned(
    stack: Stack, due: jax.Array, moments: Sequence[tuple[jax.Array, bool]], earlier: Any
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The bases and the moments after one step of orthogonal iteration, where it is `due`."""
    bases, orders = [], []
    for factor, q in zip(stack.factors, stack.bases, strict=True):
        product = _product(factor, q, [2], [1])
        # The eigenvalues as far as the basis knows them, diag(Qᵀ·L·Q), largest first
        order = jnp.argsort(-jnp.sum(q * product, 1), axis=1, stable=True)
        # Q ← qr(L·Q)
        new = jnp.linalg.qr(_after(earlier, jnp.take_along_axis(product, order[:, None, :], 2)))[0]
        earlier = jnp.where(column(due, q), new, q)
        bases.append(earlier)
        orders.append(jnp.where(due[:, None], order, jnp.arange(order.shape[1])))

    changed = []
    for x, turns in moments:
        if turns:
            new = _rotate(stack.leave(x), stack.axes, bases)
            changed.append(jnp.where(column(due, x), new, x))
        else:
            changed.append(_reordered(x, stack.axes, orders))
    return bases, changed


def _rotate(x: jax.Array, axes: Sequence[int], bases: Sequence[jax.Array], back: bool = False) -> jax.Array:
    """Qᵀ·x·P of each matrix, and the same along the axes of other arrays; Q·x·Pᵀ on the way `back`.

    NOTE: the arithmetic has the dtype of the bases, float32 at least, and its result is rounded once to that of `x`.
    """
    dtype, side = x.dtype, 2 if back else 1
    for axis, q in zip(axes, bases, strict=True):
        # Along the first axis with q in front, so that nothing needs to be transposed
        front, x = axis == 0, x.astype(q.dtype)
        product = _product(q, x, [side], [1]) if front else _product(x, q, [axis + 1], [side])
        x = product if front else jnp.moveaxis(product, -1, axis + 1)
    return x.astype(dtype)


def _product(x: jax.Array, y: jax.Array, of_x: Sequence[int], of_y: Sequence[int]) -> jax.Array:
    """The sum over some axes of x·y, for all arrays of two stacks; on no device with less than float32's digits."""
    return lax.dot_general(x, y, ((of_x, of_y), ([0], [0])), precision=lax.Precision.HIGHEST)


def _reordered(x: jax.Array, axes: Sequence[int], orders: Sequence[jax.Array]) -> jax.Array:
    """The entries along some axes in another order, which each array has for itself."""
    index = [_along(jnp.arange(length), [i], x.ndim) for i, length in enumerate(x.shape)]
    for axis, order in zip(axes, orders, strict=True):
        index[axis + 1] = _along(order, [0, axis + 1], x.ndim)
    return x[tuple(index)]


def _along(x: jax.Array, axes: Sequence[int], ndim: int) -> jax.Array:
    """x, whose axes become `axes` of `ndim`."""
    return jnp.expand_dims(x, [i for i in range(ndim) if i not in axes])


def column(x: jax.Array, like: jax.Array) -> jax.Array:
    """A vector with an entry per array of a stack, to go with the stack `like`; numbers in its dtype."""
    return _along(x if x.dtype == bool else x.astype(like.dtype), [0], like.ndim)


class _Marked(NamedTuple):
    """An array in a state that is like the parameters."""

    value: Any


def _is_marked(x: Any) -> bool:
    return isinstance(x, _Marked)


def _marked(inner: optax.GradientTransformation, state: optax.OptState) -> tuple[list[Any], Any]:
    """The arrays of the state of `inner` and their paths, those like the parameters marked; and the treedef."""
    marked = optax.tree_utils.tree_map_params(inner, _Marked, state)
    found: tuple[list[Any], Any] = jax.tree_util.tree_flatten_with_path(marked, is_leaf=_is_marked)
    return found


def _moments_of(inner: optax.GradientTransformation, state: optax.OptState, like: Any) -> list[Moment]:
    """The fields of the state of `inner` that are like the parameters, in its order."""
    moments: dict[Any, Moment] = {}
    for path, leaf in _marked(inner, state)[0]:
        if not _is_marked(leaf):
            continue
        *field, last = path
        shape = name_of([last])
        if shape not in like or jnp.shape(leaf.value) != jnp.shape(like[shape]):
            raise ValueError(
                f"`inner` keeps {name_of(path)!r} of shape {jnp.shape(leaf.value)}, which is not that of parameters: "
                "give in_eigenbasis a transformation that works on each entry by itself, such as optax.scale_by_adam"
            )
        turns = any(name_of([key]) in _TURNING for key in field[-1:])
        moments.setdefault(tuple(field), Moment({}, turns)).of_shape[shape] = leaf.value
    return list(moments.values())


def _with_moments(
    inner: optax.GradientTransformation, state: optax.OptState, moments: Sequence[Moment]
) -> optax.OptState:
    """The state of `inner` with other moments, in the order of `_moments_of`."""
    leaves, treedef = _marked(inner, state)
    new = [x for moment in moments for x in moment.of_shape.values()]
    values = iter(new)
    return treedef.unflatten([next(values) if _is_marked(leaf) else leaf for _, leaf in leaves])
