"""The optimizer: what a step does, in the order in which it does it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx.optimizers import Optimizer
from mlx.utils import tree_map

from kourkoutas import rule
from kourkoutas.adam_names import explain_adams_names
from kourkoutas.buckets import check_buckets
from kourkoutas.mlx.arithmetic import coefficients, compiled_measure, compiled_update, widest
from kourkoutas.mlx.eigenbasis import EigenStep
from kourkoutas.mlx.layout import Layout, Leaf, Members, flat, leaves_of
from kourkoutas.rule import Buckets, Hyper, NonFiniteGradient, check_learning_rate
from kourkoutas.trace import KEYS, WINDOW, Trace

Schedule = Callable[[mx.array], Any]

_DEFAULT = Hyper()
_LAST = 2**31 - 2  # counts are int32, and stay at their end instead of turning negative


class KourkoutasBeta(Optimizer):  # type: ignore[misc]
    r"""Adam whose second-moment memory shortens when a bucket's gradient norm spikes.

    .. math::
        r &= α r + (1-α) n, \quad \mathrm{sun} = \frac{n}{n + r + ε_{spike}}, \quad
        β_2 = β_{2,max} - (β_{2,max}-β_{2,min})\,\mathrm{sun} \\
        m &= β_1 m + (1-β_1) g, \quad v = β_2 v + (1-β_2) g^2 \\
        w &= w - \frac{γ}{a_1} \frac{m}{\sqrt{v / b_2} + ε}

    with n the gradient norm pooled over a bucket of parameters, and a₁, b₂ the bias corrections.

    Args:
      learning_rate: γ, a number, an array or a schedule (a callable of the step).
      alpha: decay of the moving average of n; a number, an array or a schedule.
      buckets: which parameters share one β2: "parameter", "module", "shape", "global" or a callable f(path, array),
        called once per parameter.
      diagnostics: record sun, β2 and n of each bucket at each step; read them with `pull`.

    The other arguments are those of `kourkoutas.rule.Hyper`.

    A gradient tree may leave out parameters, or hold None for them: these parameters, their moments and their step
    count stay as they are. Parameters that appear later are added to the state, as `Optimizer.init` does.

    NOTE: `nonfinite="raise"` reads the norms back at every step and cannot be used inside `mx.compile`.

    NOTE: with `basis="eigen"` the eigendecomposition of the first gradient's factors and the QR of each turn run on the
    CPU stream, since MLX has them nowhere else; everything else runs on the default device. A step inside `mx.compile`
    makes and turns the basis as an eager one does. For that MLX traces it `basis_every` + 1 times, in the first steps.

    Example:
      >>> import mlx.core as mx
      >>> params = {"w": mx.array([1.0, -2.0])}
      >>> optimizer = KourkoutasBeta(learning_rate=0.1, bias_correction="none")
      >>> params = optimizer.apply_gradients({"w": mx.array([0.5, 0.5])}, params)
      >>> print(optimizer.bucket_names, params["w"].shape)
      ('w',) (2,)
    """

    @explain_adams_names
    def __init__(
        self,
        learning_rate: float | mx.array | Schedule,
        *,
        beta1: float | None = None,
        beta2_min: float = _DEFAULT.beta2_min,
        beta2_max: float = _DEFAULT.beta2_max,
        alpha: float | mx.array | Schedule = _DEFAULT.alpha,
        eps: float = _DEFAULT.eps,
        tiny_spike: float = _DEFAULT.tiny_spike,
        tiny_denom: float = _DEFAULT.tiny_denom,
        decay: float | None = _DEFAULT.decay,
        max_ratio: float | None = _DEFAULT.max_ratio,
        adaptive_tiny: bool = _DEFAULT.adaptive_tiny,
        bias_correction: Literal["none", "beta2max", "exact"] | None = None,
        warmup_steps: int = _DEFAULT.warmup_steps,
        weight_decay: float = _DEFAULT.weight_decay,
        buckets: Buckets = "parameter",
        nonfinite: Literal["propagate", "skip", "raise"] = _DEFAULT.nonfinite,
        lr_warmup: bool = _DEFAULT.lr_warmup,
        basis: Literal["eigen"] | None = _DEFAULT.basis,
        basis_every: int = _DEFAULT.basis_every,
        basis_memory: float = _DEFAULT.basis_memory,
        basis_limit: int = _DEFAULT.basis_limit,
        diagnostics: bool = False,
    ) -> None:
        if not callable(learning_rate):
            check_learning_rate(learning_rate, "learning_rate")
        scheduled = callable(alpha) or isinstance(alpha, mx.array)
        self.hyper = Hyper.pick({**locals(), "alpha": _DEFAULT.alpha if scheduled else alpha})
        check_buckets(buckets)
        if not isinstance(diagnostics, bool):
            raise TypeError(f"`diagnostics` must be True or False; got {diagnostics!r}")
        super().__init__()
        self._state: dict[str, Any] = self._state
        self.buckets = buckets
        self.diagnostics = diagnostics
        self._layout = Layout(self.hyper, buckets, diagnostics)
        values: dict[str, Any] = {"learning_rate": learning_rate, "alpha": alpha}
        for name, value in values.items():
            self._maybe_schedule(name, value)
            self._state[name] = mx.array(self._state[name])  # a schedule may return a Python number

    @property
    def bucket_names(self) -> tuple[str, ...]:
        """One printable name per bucket, in the order of the bucket statistics in the state."""
        return self._layout.parts.bucket_names

    @property
    def state(self) -> dict[str, Any]:
        """The state: a tree of arrays, see `kourkoutas.mlx.layout`. It may be set to one that was saved."""
        return self._state

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        missing = [name for name in ("step", "learning_rate", "alpha") if name not in state]
        if missing:
            raise ValueError(
                f"`state` has no {missing[0]!r}, so it is not one of KourkoutasBeta: set one that was saved from it"
            )
        self._initialized, self._state = False, state
        self._layout = Layout(self.hyper, self.buckets, self.diagnostics)

    def pull(self, trace: Trace) -> None:
        """Move the rows recorded since the last pull into `trace`, made with `Trace(optimizer.bucket_names)`."""
        if not self.diagnostics:
            raise ValueError("`diagnostics` is False, so nothing was recorded: construct with diagnostics=True")
        if not self._initialized:
            raise ValueError("the optimizer has no state yet: call init(parameters) or take a step first")
        trace.pull(np.array(self._state["ring"]), self._state["count"].item())

    def init(self, parameters: Any) -> None:
        """Allocate the state of all parameters in the tree that have none yet; what is there stays."""
        self._build({path: p for path, p in flat(parameters).items() if isinstance(p, mx.array)}, {})

    def _build(self, new: dict[str, mx.array], parameters: Any) -> None:
        self._layout.build(self._state, new, parameters)
        self._initialized = True

    def apply_gradients(self, gradients: Any, parameters: Any) -> Any:
        """The updated parameters, as a tree of the same structure as `gradients`."""
        leaves = list(leaves_of(gradients, parameters))
        if len({leaf.path for leaf in leaves}) < len(leaves):
            flat(gradients)  # which names the path that occurs twice
        layout, state = self._layout, self._state
        if not self._initialized or any(leaf.path not in layout.place for leaf in leaves):
            self._build({leaf.path: leaf.parameter for leaf in leaves}, parameters)
        present = [leaf for leaf in leaves if leaf.gradient is not None]
        # In the order of the state's arrays, so that these need no reordering when every gradient is there.
        present.sort(key=lambda leaf: layout.place[leaf.path])
        self._check_shapes(present)
        scheduled = self._scheduled()
        members = layout.members([layout.place[leaf.path] for leaf in present])
        if members.rows is not None:
            state["t"] = mx.broadcast_to(state["t"], (len(layout.place),))

        norm = norms = mean_abs = None
        if present:
            measure = compiled_measure(self.hyper, members, state["ema"].dtype, widest())
            measured = [leaf.parameter for leaf in present] if self.hyper.adaptive_tiny else []
            norm, norms, mean_abs = measure([leaf.gradient for leaf in present], measured)
        if self.hyper.nonfinite == "raise" and norm is not None:
            _raise_unless_finite(norm, members)

        state.update(scheduled)
        state["step"] = self.step + 1
        updated: dict[str, mx.array] = {}
        if norm is not None:
            updated = self._step(present, members, norm, norms, mean_abs)
        elif self.diagnostics:
            _record(state, members, None)
        result = iter([updated.get(leaf.path, leaf.parameter) for leaf in leaves])
        return tree_map(lambda _: next(result), gradients)

    def _check_shapes(self, present: list[Leaf]) -> None:
        for leaf in present:
            shape = leaf.parameter.shape
            if any(self._state[slot][leaf.path].shape != shape for slot in self._layout.slots):
                raise ValueError(
                    f"the state of {leaf.path!r} has another shape than the parameter, {shape}: load a state that was "
                    "saved with these parameters, or make a new optimizer"
                )

    def _scheduled(self) -> dict[str, mx.array]:
        """What the schedules give for this step, before anything has changed."""
        scheduled = {name: mx.array(schedule(self.step)) for name, schedule in self._schedulers.items()}
        for name in ("learning_rate", "alpha"):
            value = scheduled.get(name, self._state[name])
            if value.size != 1:
                raise ValueError(f"`{name}` must be one number; got an array of shape {value.shape}")
        return scheduled

    def _step(
        self, present: list[Leaf], members: Members, norm: mx.array, norms: mx.array | None, mean_abs: mx.array | None
    ) -> dict[str, mx.array]:
        """From norms to new parameters, by path; the state moves with them.

        `norm` is that of each bucket, `norms` those of each parameter, which a basis needs.
        """
        layout, state = self._layout, self._state
        paths = [leaf.path for leaf in present]
        grads: list[Any] = [leaf.gradient for leaf in present]
        params = [leaf.parameter for leaf in present]
        eigen = None if self.hyper.basis is None else EigenStep(layout, members, state, paths)
        lr = state["learning_rate"].astype(norm.dtype).reshape(())
        alpha: Any = state["alpha"].astype(norm.dtype).reshape(())
        before = {name: members.take(name, state[name]) for name in layout.scalars}
        before["t"] = mx.minimum(before["t"], _LAST)
        step = rule.step(
            self.hyper.with_alpha(alpha),
            lr,
            norm,
            rule.State(
                ema=before["ema"], step=before["t"], log_beta2=before.get("log_beta2"), skipped=before["skipped"]
            ),
            mx,
            members=members,
            mean_abs=mean_abs,
            starts=None if eigen is None else eigen.starts,
        )
        after = {
            "ema": step.state.ema,
            "t": step.state.step,
            "log_beta2": step.state.log_beta2,
            "skipped": step.state.skipped,
        }
        if eigen is not None:
            after["seen"] = mx.minimum(before["seen"], _LAST) + 1
        for name in layout.scalars:
            state[name] = members.put(name, state[name], after[name])
        if self.diagnostics:
            _record(state, members, step)

        k = {}
        for name, x in coefficients(step.k).items():
            k[name] = x if isinstance(x, mx.array) else mx.array(x, lr.dtype)
        # NOTE: a loop that evaluates only the parameters must evaluate the counts, the ring and the factors with them;
        # they would pile up as an ever longer unevaluated graph otherwise.
        pending = [x for x in state.values() if isinstance(x, mx.array)]
        if eigen is not None:
            grads = eigen.take_in(grads, norms, step.updated)
            pending += eigen.pending
        k["rate"] = mx.depends([k["rate"]], pending)[0]
        slots = [[state[slot][path] for path in paths] for slot in layout.slots]
        if eigen is None:
            new, *moments = compiled_update(self.hyper, members)(k, step.updated_each, grads, params, slots)
        else:
            new, *moments = eigen.update(k, grads, params, slots)
        for slot, arrays in zip(layout.slots, moments, strict=True):
            state[slot].update(zip(paths, arrays, strict=True))
        return dict(zip(paths, new, strict=True))


def _raise_unless_finite(norm: mx.array, members: Members) -> None:
    try:
        bad = np.flatnonzero(~np.isfinite(np.array(norm)))
    except (RuntimeError, ValueError):
        raise ValueError(
            "`nonfinite` is 'raise', which reads the norms at every step and so cannot be compiled: "
            "use nonfinite='skip', or call the optimizer outside mx.compile"
        ) from None
    if bad.size:
        raise NonFiniteGradient(members.bucket_names[int(bad[0])])


def _record(state: dict[str, Any], members: Members, step: rule.Step | None) -> None:
    """Write (sun, β2, n) of all buckets: NaN for those without a gradient (`step` is None: all) and those skipped."""
    if step is None:
        row = _blank(state["ring"])
    else:
        row = mx.stack([step.sun, step.beta2, step.norm])
        if members.columns is not None:
            here = mx.array([members.columns] * len(KEYS), mx.int32)
            row = mx.put_along_axis(_blank(state["ring"]), here, row, axis=1)
    # ring[(t-1) % WINDOW] = (sun, β2, n) of step t
    state["ring"] = mx.slice_update(state["ring"], row[None], (state["count"] % WINDOW).reshape(1), (0,))
    state["count"] = state["count"] + 1


def _blank(ring: mx.array) -> mx.array:
    """A row of `ring` in which no bucket has anything."""
    return mx.full(ring.shape[1:], math.nan, ring.dtype)
