"""Kourkoutas-β for MLX.

    from kourkoutas.mlx import KourkoutasBeta

    optimizer = KourkoutasBeta(learning_rate=1e-3)
    optimizer.update(model, grads)

The state holds arrays only, in one flat dictionary per kind, so that it saves with `tree_flatten` and
`mx.save_safetensors` and is captured by `mx.compile`:

    step, learning_rate, alpha         scalars
    m, v, v_max                        path → array, in the parameter's dtype
    t                                  step count: one while all parameters share it, else as log_beta2
    log_beta2                          (P,), one entry per parameter, paths in natural order
    ema, skipped                       (B,), one entry per bucket
    ring, count                        as `kourkoutas.trace` describes them, with `diagnostics=True`

NOTE: a parameter is known by its path in the tree (`layers.0.weight`), never by object identity: MLX makes new arrays
at every step.

NOTE: `t` is one number as long as every parameter has had a gradient at every step. All of them then share their bias
corrections, which spares MLX two small operations per parameter and step. That it becomes a vector otherwise is seen in
the state, by a compiled step as well.

NOTE: norms and the bucket statistics are float32, or float64 as soon as one parameter is. Half-precision parameters
are updated in float32 and rounded once; their moments are kept in the parameter's dtype. With float64 parameters give
`learning_rate` and `alpha` as float64 arrays, since MLX makes float32 of a Python number.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

try:
    import mlx.core as mx
    from mlx.optimizers import Optimizer
    from mlx.utils import tree_flatten, tree_map
except ImportError:
    raise ImportError("kourkoutas.mlx needs MLX: pip install 'kourkoutas-beta[mlx]'") from None

from kourkoutas import rule
from kourkoutas.buckets import Partition, bucket_key, check_buckets, partition
from kourkoutas.rule import Buckets, Hyper, NonFiniteGradient, check_learning_rate
from kourkoutas.trace import WINDOW, Trace

Schedule = Callable[[mx.array], Any]

PER_PARAMETER = ("t", "log_beta2")
_STATE = ("ema", "t", "log_beta2", "skipped")  # the names of `rule.State` here

_DEFAULT = Hyper()


class KourkoutasBeta(Optimizer):  # type: ignore[misc]
    r"""Adam whose second-moment memory shortens when a bucket's gradient norm spikes.

    .. math::
        r &= α r + (1-α) n, \quad \mathrm{sun} = \frac{n}{n + r + ε_{spike}}, \quad
        β_2 = β_{2,max} - (β_{2,max}-β_{2,min})\,\mathrm{sun} \\
        m &= β_1 m + (1-β_1) g, \quad v = β_2 v + (1-β_2) g^2 \\
        w &= w - \frac{λ}{a_1} \frac{m}{\sqrt{v / b_2} + ε}

    with n the gradient norm pooled over a bucket of parameters, and a₁, b₂ the bias corrections.

    Args:
      learning_rate: λ, a number, an array or a schedule (a callable of the step).
      alpha: decay of the moving average of n; a number, an array or a schedule.
      buckets: which parameters share one β2: "parameter", "module", "shape", "global" or a callable f(path, array),
        called once per parameter.
      diagnostics: record sun and β2 of each bucket at each step; read them with `pull`.

    The other arguments are those of `kourkoutas.rule.Hyper`.

    A gradient tree may leave out parameters, or hold None for them: these parameters, their moments and their step
    count stay as they are. Parameters that appear later are added to the state, as `Optimizer.init` does.

    NOTE: `nonfinite="raise"` reads the norms back at every step and cannot be used inside `mx.compile`.

    Example:
      >>> import mlx.core as mx
      >>> params = {"w": mx.array([1.0, -2.0])}
      >>> optimizer = KourkoutasBeta(learning_rate=0.1, bias_correction="none")
      >>> params = optimizer.apply_gradients({"w": mx.array([0.5, 0.5])}, params)
      >>> print(optimizer.bucket_names, params["w"].shape)
      ('w',) (2,)
    """

    def __init__(
        self,
        learning_rate: float | mx.array | Schedule,
        *,
        beta1: float = _DEFAULT.beta1,
        beta2_min: float = _DEFAULT.beta2_min,
        beta2_max: float = _DEFAULT.beta2_max,
        alpha: float | mx.array | Schedule = _DEFAULT.alpha,
        eps: float = _DEFAULT.eps,
        tiny_spike: float = _DEFAULT.tiny_spike,
        tiny_denom: float = _DEFAULT.tiny_denom,
        decay: float | None = _DEFAULT.decay,
        max_ratio: float | None = _DEFAULT.max_ratio,
        adaptive_tiny: bool = _DEFAULT.adaptive_tiny,
        bias_correction: Literal["none", "beta2max", "exact"] = _DEFAULT.bias_correction,
        warmup_steps: int = _DEFAULT.warmup_steps,
        weight_decay: float = _DEFAULT.weight_decay,
        buckets: Buckets = "parameter",
        nonfinite: Literal["propagate", "skip", "raise"] = _DEFAULT.nonfinite,
        diagnostics: bool = False,
    ) -> None:
        if not callable(learning_rate):
            check_learning_rate(learning_rate, "learning_rate")
        self.hyper = Hyper(
            beta1=beta1,
            beta2_min=beta2_min,
            beta2_max=beta2_max,
            alpha=_DEFAULT.alpha if callable(alpha) or isinstance(alpha, mx.array) else alpha,
            eps=eps,
            tiny_spike=tiny_spike,
            tiny_denom=tiny_denom,
            decay=decay,
            max_ratio=max_ratio,
            adaptive_tiny=adaptive_tiny,
            bias_correction=bias_correction,
            warmup_steps=warmup_steps,
            weight_decay=weight_decay,
            nonfinite=nonfinite,
        )
        check_buckets(buckets)
        if not isinstance(diagnostics, bool):
            raise TypeError(f"`diagnostics` must be True or False; got {diagnostics!r}")
        super().__init__()
        self._state: dict[str, Any] = self._state
        self.buckets = buckets
        self.diagnostics = diagnostics
        self._keys: dict[str, Hashable] = {}
        self._names: list[str] = []
        self._number: dict[str, int] = {}
        self._parts = Partition((), ())
        values: dict[str, Any] = {"learning_rate": learning_rate, "alpha": alpha}
        for name, value in values.items():
            self._maybe_schedule(name, value)
            self._state[name] = mx.array(self._state[name])  # a schedule may return a Python number

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """One printable name per bucket, in the order of the bucket statistics in the state."""
        return self._parts.names

    def pull(self, trace: Trace) -> None:
        """Move the rows recorded since the last pull into `trace`, made with `Trace(optimizer.bucket_names)`."""
        if not self.diagnostics:
            raise ValueError("`diagnostics` is False, so nothing was recorded: construct with diagnostics=True")
        if not self._initialized:
            raise ValueError("the optimizer has no state yet: call init(parameters) or take a step first")
        trace.pull(np.array(self._state["ring"]), self._state["count"].item())

    def init(self, parameters: Any) -> None:
        """Allocate the state of all parameters in the tree that have none yet; what is there stays."""
        self._build({path: p for path, p in _flat(parameters).items() if isinstance(p, mx.array)}, {})

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """The updated parameters, as a tree of the same structure as `gradients`."""
        leaves = list(_pairs(gradients, parameters))
        if not self._initialized or any(path not in self._number for path, _, _ in leaves):
            self._build({path: p for path, _, p in leaves}, parameters)
        state = self._state
        # In the order of the state's vectors, so that they need no reordering when every gradient is there.
        present = sorted((leaf for leaf in leaves if leaf[1] is not None), key=lambda leaf: self._number[leaf[0]])
        paths, grads, params = (
            [leaf[0] for leaf in present],
            [leaf[1] for leaf in present],
            [leaf[2] for leaf in present],
        )
        plan = self._plan([self._number[path] for path in paths])
        if plan.rows is not None:
            state["t"] = mx.broadcast_to(state["t"], (len(self._names),))

        norm = mean = None
        if present:
            measure = _compiled_measure(plan, _precision(state["ema"]))
            norm, mean = measure(grads, params if self.hyper.adaptive_tiny else [])
        if self.hyper.nonfinite == "raise" and norm is not None:
            self._raise_unless_finite(norm, plan)

        for name, schedule in self._schedulers.items():
            state[name] = mx.array(schedule(self.step))
        state["step"] = self.step + 1

        out: dict[str, mx.array] = {}
        if norm is None:
            self._record(None)
        else:
            vectors = {name: _take(state[name], plan.axis(name)) for name in self._vectors}
            lr = state["learning_rate"].astype(norm.dtype)
            step = _scalars(plan, state["alpha"], lr, norm, mean, vectors)
            vectors = {name: x for name, x in zip(_STATE, step.state, strict=True) if name in vectors}
            state.update({name: _put(state[name], plan.axis(name), x) for name, x in vectors.items()})
            self._record(_row(plan, step) if self.diagnostics else None)
            # NOTE: a loop that evaluates only the parameters must evaluate the counts and the ring with them; they
            # would pile up as an ever longer unevaluated graph otherwise.
            k = {name: x if isinstance(x, mx.array) else mx.array(x, lr.dtype) for name, x in _numbers(step.k)}
            k["rate"] = mx.depends([k["rate"]], [x for x in state.values() if isinstance(x, mx.array)])[0]
            slots = [[state[slot][path] for path in paths] for slot in self._slots]
            new, *moments = _compiled_update(plan)(k, step.fine_each, grads, params, slots)
            for slot, arrays in zip(self._slots, moments, strict=True):
                state[slot].update(zip(paths, arrays, strict=True))
            out = dict(zip(paths, new, strict=True))
        result = iter([out.get(path, p) for path, _, p in leaves])
        return tree_map(lambda _: next(result), gradients)

    @property
    def _slots(self) -> tuple[str, ...]:
        return ("m", "v") if self.hyper.leak is None else ("m", "v", "v_max")

    @property
    def _vectors(self) -> tuple[str, ...]:
        exact = ("log_beta2",) if self.hyper.bias_correction == "exact" else ()
        return ("t", *exact, "ema", "skipped")

    def _plan(self, numbers: list[int]) -> _Plan:
        """The plan of a step in which the parameters `numbers`, ascending, have a gradient."""
        owner = [self._parts.index[i] for i in numbers]
        columns = tuple(sorted(set(owner)))
        local = {b: k for k, b in enumerate(columns)}
        return _Plan(
            hyper=self.hyper,
            rows=None if len(numbers) == len(self._names) else tuple(numbers),
            columns=None if len(columns) == len(self._parts.names) else columns,
            owner=tuple(local[b] for b in owner),
            buckets=len(self._parts.names),
        )

    def _raise_unless_finite(self, norm: mx.array, plan: _Plan) -> None:
        try:
            bad = np.flatnonzero(~np.isfinite(np.array(norm)))
        except (RuntimeError, ValueError):
            raise ValueError(
                "`nonfinite` is 'raise', which reads the norms at every step and so cannot be compiled: "
                "use nonfinite='skip', or call the optimizer outside mx.compile"
            ) from None
        if bad.size:
            columns = plan.columns or tuple(range(plan.buckets))
            raise NonFiniteGradient(self._parts.names[columns[int(bad[0])]])

    def _record(self, row: mx.array | None) -> None:
        """Write one row of the trace; None when no bucket had a gradient."""
        if not self.diagnostics:
            return
        state = self._state
        if row is None:
            row = mx.full((2, len(self._parts.names)), math.nan, state["ring"].dtype)
        # ring[(t-1) % WINDOW] = (sun, β2) of step t
        state["ring"] = mx.slice_update(state["ring"], row[None], (state["count"] % WINDOW).reshape(1), (0,))
        state["count"] = state["count"] + 1

    def _build(self, new: Mapping[str, mx.array], parameters: Any) -> None:
        """Bring the state to the union of its own paths and those of `new`, keeping every value that is there."""
        for path, p in new.items():
            if not mx.issubdtype(p.dtype, mx.floating):
                raise TypeError(
                    f"parameter {path!r} must be an array of a real floating-point dtype; got {p.dtype}: "
                    "freeze it, or leave it out of the gradients"
                )
        state = self._state
        # NOTE: tree_unflatten nests the dotted paths of a loaded state; flattening brings both forms to one.
        for slot in ("m", "v", "v_max"):
            if slot in state or slot in self._slots:
                state[slot] = _flat(state.get(slot, {}))
        old = _natural(state["m"])
        names = _natural({*old, *new})
        if any(path not in self._keys for path in old):
            known = _flat(parameters)
            new = {**{path: known.get(path, state["m"][path]) for path in old}, **new}
        for path in names:
            if path not in self._keys:
                self._keys[path] = bucket_key(self.buckets, path, new[path])
        before, after = self._partition(old), self._partition(names)

        dtype = mx.float64 if any(p.dtype == mx.float64 for p in (*new.values(), *state["m"].values())) else mx.float32
        home = {path: i for i, path in enumerate(old)}
        from_old = [home.get(path, -1) for path in names]
        bucket_home = {after.index[names.index(path)]: before.index[i] for path, i in home.items()} if old else {}
        bucket_from_old = [bucket_home.get(b, -1) for b in range(len(after.names))]
        self._spread_steps(len(old), grown=len(names) > len(old) > 0)
        for name in self._vectors:
            if name == "t" and "t" in state and not state["t"].ndim:
                continue
            source, size = (from_old, len(old)) if name in PER_PARAMETER else (bucket_from_old, len(before.names))
            self._extend(name, source, size, mx.int32 if name in ("t", "skipped") else dtype, bool(old))
        if self.diagnostics:
            self._extend_ring(bucket_from_old, len(before.names), dtype)
        for slot in self._slots:
            for path, p in new.items():
                if path not in state[slot]:
                    state[slot][path] = mx.zeros_like(p)
        self._names, self._parts = names, after
        self._number = {path: i for i, path in enumerate(names)}
        self._initialized = True

    def _partition(self, names: list[str]) -> Partition:
        return partition(lambda path, _: self._keys[path], names, names)

    def _spread_steps(self, size: int, grown: bool) -> None:
        """Start the step count, and make it a vector of `size` as soon as parameters may differ in it."""
        state = self._state
        if not size:
            state["t"] = mx.array(0, mx.int32)
        if "t" in state and not state["t"].ndim and (grown or self.hyper.nonfinite == "skip"):
            state["t"] = mx.broadcast_to(state["t"], (size,))

    def _extend(self, name: str, source: list[int], size: int, dtype: mx.Dtype, loaded: bool) -> None:
        """state[name][i] ← its entry source[i], or zero where source[i] is -1."""
        state = self._state
        if name not in state:
            if loaded:
                raise ValueError(
                    f"the state has no {name!r}, which these settings need: load a state saved with the same settings"
                )
            state[name] = mx.zeros((size,), dtype)
        if state[name].shape != (size,):
            raise ValueError(
                f"the state's {name!r} has shape {tuple(state[name].shape)} but `buckets` {self.buckets!r} give "
                f"({size},): load a state saved with the same parameters and buckets"
            )
        if source != list(range(size)):
            padded = mx.concatenate([state[name], mx.zeros((1,), state[name].dtype)])
            state[name] = padded[mx.array([i if i >= 0 else size for i in source], mx.int32)]

    def _extend_ring(self, source: list[int], size: int, dtype: mx.Dtype) -> None:
        state = self._state
        ring = state.get("ring")
        if ring is None or ring.shape[2] != size:
            ring, state["count"] = mx.full((WINDOW, 2, size), math.nan, dtype), mx.array(0, mx.int32)
        if source != list(range(size)):
            padded = mx.concatenate([ring, mx.full((ring.shape[0], 2, 1), math.nan, ring.dtype)], axis=2)
            ring = padded[:, :, mx.array([i if i >= 0 else size for i in source], mx.int32)]
        state["ring"] = ring


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a step does, apart from the numbers: the key under which its compiled form is kept.

    Attributes:
      rows: numbers of the parameters that have a gradient; None when all have one.
      columns: numbers of the buckets that have a gradient; None when all have one.
      owner: for each parameter with a gradient, the position of its bucket among `columns`.
      buckets: how many buckets there are.
    """

    hyper: Hyper
    rows: tuple[int, ...] | None
    columns: tuple[int, ...] | None
    owner: tuple[int, ...]
    buckets: int

    def axis(self, name: str) -> tuple[int, ...] | None:
        """The entries of the state's vector `name` that this step concerns."""
        return self.rows if name in PER_PARAMETER else self.columns

    @property
    def one_each(self) -> bool:
        return self.owner == tuple(range(len(self.owner)))

    @property
    def width(self) -> int:
        """How many buckets have a gradient."""
        return self.buckets if self.columns is None else len(self.columns)


def _precision(x: mx.array) -> mx.Dtype:
    return mx.float64 if x.dtype == mx.float64 else mx.float32


def _trim(x: mx.array, k: int) -> tuple[mx.array, list[mx.array]]:
    """x without as many of its last entries as k to divide its size takes, and these entries."""
    tail = x.size % k
    if not tail:
        return x, []
    x = x.reshape(-1)
    return x[:-tail], [x[-tail:]]


def _fold(f: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """A vector of some 1024 entries at most, whose sum is Σ f(x).

    NOTE: one pass of `mx.sum` over n entries on the CPU adds serially and loses percents at n = 10⁷. Folding n entries
    into rows of about √n and adding the rows stays within 1e-6, and runs twice as fast since it adds many at a time.

    NOTE: a large x is first folded eight times in the kernel that computes f: to write f(x) to memory takes longer
    than all the rest.
    """
    rest: list[mx.array] = []
    if x.size < 1 << 18:
        x = f(x)
    else:
        x, tail = _trim(x, 8)
        rest += [f(t) for t in tail]
        x = functools.reduce(operator.add, [f(part) for part in mx.split(x.reshape(-1), 8)])
    while x.size > 1024:
        width = 1 << (x.size.bit_length() // 2)
        x, tail = _trim(x, width)
        rest += tail
        x = mx.sum(x.reshape(-1, width), axis=0)
    return mx.concatenate([x.reshape(-1), *rest]) if rest else x.reshape(-1)


def _sums(f: Callable[[mx.array], mx.array], arrays: list[mx.array]) -> mx.array:
    """Σ f(x) of each array; those of one size together, as every operation has its price."""
    groups: dict[tuple[int, bool], list[int]] = {}
    vectors = []
    for i, x in enumerate(arrays):
        small = x.size <= 1024
        vectors.append(x.reshape(-1) if small else _fold(f, x))
        groups.setdefault((vectors[i].size, small), []).append(i)
    sums = []
    for (size, small), group in groups.items():
        rows = mx.concatenate([vectors[i] for i in group]).reshape(len(group), size)
        sums.append(mx.sum(f(rows) if small else rows, axis=1))
    order = [i for group in groups.values() for i in group]
    if order == sorted(order):
        return mx.concatenate(sums)
    return mx.concatenate(sums)[mx.array(np.argsort(order).astype(np.int32))]


def _entry(x: mx.array, i: int) -> mx.array:
    """x[i] of a vector as a 0-d array, in one operation where indexing takes two."""
    return mx.as_strided(x, (), (), i)


@functools.lru_cache(maxsize=256)
def _compiled_measure(plan: _Plan, dtype: mx.Dtype) -> Callable[..., Any]:
    """(norm of each bucket, ⟨|p|⟩ of each of `params`), of parameters that have a gradient."""

    def measure(grads: list[mx.array], params: list[mx.array]) -> tuple[mx.array, mx.array | None]:
        # n = sqrt(Σ_p Σ_i g_i²)
        squares = _sums(lambda g: mx.square(g.astype(dtype)), grads)
        if not plan.one_each:
            squares = mx.zeros(plan.width, dtype).at[mx.array(plan.owner, mx.int32)].add(squares)
        norm = mx.sqrt(squares)
        if not params:
            return norm, None
        magnitude = _sums(lambda p: mx.abs(p.astype(dtype)), params)
        return norm, magnitude / mx.array([max(p.size, 1) for p in params], dtype)

    return mx.compile(measure)


def _take(x: mx.array, numbers: tuple[int, ...] | None) -> mx.array:
    return x if numbers is None else x[mx.array(numbers, mx.int32)]


def _put(x: mx.array, numbers: tuple[int, ...] | None, new: mx.array) -> mx.array:
    return new if numbers is None else mx.put_along_axis(x, mx.array(numbers, mx.int32), new, axis=0)


def _numbers(k: rule.Coefficients) -> list[tuple[str, Any]]:
    """What the update reads; β1 is a number in its code."""
    return [(name, x) for name, x in k._asdict().items() if x is not None and name != "c1"]


class _Members:
    """Parameters with a gradient and their buckets, for `rule.step`."""

    def __init__(self, plan: _Plan) -> None:
        self.owner, self.shape = mx.array(plan.owner, mx.int32), (plan.width,)

    def spread(self, x: mx.array) -> mx.array:
        return x[self.owner]

    def largest(self, x: mx.array) -> mx.array:
        return mx.zeros(self.shape, x.dtype).at[self.owner].maximum(x) if x.ndim else x


def _scalars(
    plan: _Plan, alpha: mx.array, lr: mx.array, norm: mx.array, mean: mx.array | None, vectors: dict[str, mx.array]
) -> rule.Step:
    """`rule.step` of what has a gradient."""
    scheduled: Any = alpha.astype(norm.dtype)
    hyper = replace(plan.hyper, alpha=scheduled)
    state = rule.State(*(vectors.get(name) for name in _STATE))
    members = None if plan.one_each else _Members(plan)
    return rule.step(hyper, lr, norm, state, mx, members=members, mean_abs=mean)


@functools.lru_cache(maxsize=256)
def _compiled_update(plan: _Plan) -> Callable[..., Any]:
    """The elementwise part of a step, compiled: (parameters, moments) of all parameters that have a gradient.

    NOTE: the scalars come in as entries of vectors, 0-d, and not as numbers in the code: MLX then fuses one kernel per
    parameter, and builds the same kernel for every value of the hyper-parameters.
    """
    hyper = plan.hyper

    def update_one(
        g: mx.array, p: mx.array, slots: list[mx.array], scalars: dict[str, mx.array]
    ) -> tuple[mx.array, ...]:
        dtype = _precision(p)
        x = {name: value.astype(dtype) for name, value in scalars.items()}
        theta, g = p.astype(dtype), g.astype(dtype)
        m, v, *rest = (slot.astype(dtype) for slot in slots)
        # m = β1·m + (1-β1)·g,  v = β2·v + (1-β2)·g²
        m = hyper.beta1 * m + (1 - hyper.beta1) * g
        v = (1 - x["c2"]) * v + x["c2"] * mx.square(g)
        # v̂ = v, or v_max = max(δ·v_max, v)
        v_hat = v if hyper.leak is None else mx.maximum(x["leak"] * rest[0], v)
        # Δθ = rate·m / (sqrt(v̂) + floor), clipped to ±limit
        delta = x["rate"] * m / (mx.sqrt(v_hat) + x["floor"])
        if hyper.max_ratio is not None:
            delta = mx.minimum(mx.maximum(delta, -x["limit"]), x["limit"])
        # θ ← (1 - ρ·weight_decay)·θ - Δθ
        if hyper.weight_decay:
            theta = x["shrink"] * theta
        new = (theta - delta, m, v) if hyper.leak is None else (theta - delta, m, v, v_hat)
        return tuple(value.astype(old.dtype) for value, old in zip(new, (p, *slots), strict=True))

    def update(
        k: dict[str, mx.array],
        fine: mx.array | None,
        grads: list[mx.array],
        params: list[mx.array],
        slots: list[list[mx.array]],
    ) -> list[list[mx.array]]:
        out = []
        for i, (g, p, *old) in enumerate(zip(grads, params, *slots, strict=True)):
            new = update_one(g, p, old, {name: _entry(x, i) if x.ndim else x for name, x in k.items()})
            if fine is not None:
                new = tuple(mx.where(_entry(fine, i), x, y) for x, y in zip(new, (p, *old), strict=True))
            out.append(new)
        return [list(arrays) for arrays in zip(*out, strict=True)]

    return mx.compile(update)


def _row(plan: _Plan, step: rule.Step) -> mx.array:
    """(sun, β2) of all buckets, NaN for those without a gradient and those skipped."""
    row = mx.stack([step.sun, step.beta2])
    if plan.columns is None:
        return row
    blank = mx.full((2, plan.buckets), math.nan, row.dtype)
    return mx.put_along_axis(blank, mx.array([plan.columns] * 2, mx.int32), row, axis=1)


def _flat(tree: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    tree_flatten(tree, destination=flat)
    return flat


def _natural(paths: Any) -> list[str]:
    """Paths in natural order (`layers.2` before `layers.10`), which depends on the names alone."""
    return sorted(paths, key=lambda path: [(not s.isdigit(), int(s) if s.isdigit() else 0, s) for s in path.split(".")])


def _pairs(gradients: Any, parameters: Any, path: str = "") -> Iterator[tuple[str, mx.array | None, mx.array]]:
    """(path, gradient or None, parameter) for each leaf of `gradients`, in the order of `tree_flatten`."""
    if isinstance(gradients, dict):
        children: Any = gradients.items()
    elif isinstance(gradients, (list, tuple)):
        children = enumerate(gradients)
    else:
        if gradients is None and not isinstance(parameters, mx.array):
            raise _mismatch(path, "an array", parameters)
        if gradients is not None and (
            not isinstance(parameters, mx.array) or getattr(gradients, "shape", None) != parameters.shape
        ):
            raise _mismatch(path, f"shape {getattr(gradients, 'shape', None)}", parameters)
        yield path, gradients, parameters
        return
    for key, child in children:
        below = f"{path}.{key}" if path else str(key)
        try:
            parameter = parameters[key]
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"`gradients` has an entry at {below!r} and `parameters` has none: "
                "compute the gradients with respect to the same tree"
            ) from None
        yield from _pairs(child, parameter, below)


def _mismatch(path: str, gradient: str, parameter: Any) -> ValueError:
    found = f"shape {parameter.shape}" if isinstance(parameter, mx.array) else f"a {type(parameter).__name__}"
    return ValueError(
        f"`gradients` has {gradient} at {path!r} and `parameters` has {found}: "
        "compute the gradients with respect to the same tree"
    )
