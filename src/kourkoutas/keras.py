"""Kourkoutas-β for Keras 3, on its PyTorch and JAX backends.

    optimizer = KourkoutasBeta(learning_rate=1e-3)
    model.compile(optimizer=optimizer, loss="mse")

One code for both backends, written in `keras.ops`; the scalars come from `kourkoutas.rule`. It is the plain way through
the update: where speed matters and the model is a torch module or a JAX tree, use `kourkoutas.torch` or
`kourkoutas.optax` directly.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from kourkoutas import rule
from kourkoutas.adam_names import explain_adams_names
from kourkoutas.buckets import check_buckets, partition, unique_names
from kourkoutas.rule import Buckets, Hyper, check_learning_rate

try:
    import keras
    from keras import ops
except ImportError as error:
    raise ImportError("kourkoutas.keras needs Keras 3 with torch or jax: pip install keras") from error

if keras.backend.backend() not in ("torch", "jax"):
    raise ImportError(
        f"kourkoutas.keras runs on the torch and jax backends of Keras; this process uses {keras.backend.backend()!r}: "
        "set the environment variable KERAS_BACKEND before Keras is imported"
    )


@keras.saving.register_keras_serializable(package="kourkoutas")
class KourkoutasBeta(keras.optimizers.Optimizer):  # type: ignore[misc]
    r"""Adam whose second-moment memory shortens when a bucket's gradient norm spikes.

    .. math::
        r = α r + (1-α) n, \quad \mathrm{sun} = \frac{n}{n + r + \mathrm{tiny\_spike}}, \quad
        β_2 = β_{2,max} - (β_{2,max}-β_{2,min})\,\mathrm{sun}

    Args:
      learning_rate: a float, a Keras schedule or a callable.
      weight_decay: decoupled; `exclude_from_weight_decay` works as in Keras's AdamW.
      buckets: what shares a β2: "parameter", "module" (a layer), "shape", "global" or a callable `f(name, variable)`.
        Names are the paths of the variables with dots: `dense.kernel`.
      name: of the optimizer.
      options: the hyper-parameters of :class:`kourkoutas.Hyper`, and Keras's own clipnorm, clipvalue, global_clipnorm,
        use_ema, ema_momentum, ema_overwrite_frequency, loss_scale_factor, gradient_accumulation_steps.

    NOTE: m, v and v_max have the variable's dtype; scalars are float32, or float64 for float64 variables. float16 and
    bfloat16 variables are updated in float32 and rounded once. `nonfinite="raise"` is refused: a compiled step cannot
    raise. `basis="eigen"` is refused, too: it is in `kourkoutas.torch`, `kourkoutas.optax` and `kourkoutas.mlx`.
    """

    @explain_adams_names
    def __init__(
        self,
        learning_rate: Any = 1e-3,
        *,
        weight_decay: float | None = None,
        buckets: Buckets = "parameter",
        name: str = "kourkoutas_beta",
        **options: Any,
    ) -> None:
        hyper = Hyper(**{k: options.pop(k) for k in rule.HYPER_NAMES if k in options}, weight_decay=weight_decay or 0.0)
        if hyper.nonfinite == "raise":
            raise ValueError('`nonfinite` must be "propagate" or "skip" in Keras, whose compiled steps cannot raise')
        if hyper.basis is not None:
            raise ValueError(
                f"`basis` must be None in Keras; got {hyper.basis!r}: train the model with kourkoutas.torch or "
                "kourkoutas.optax, which have it"
            )
        check_buckets(buckets)
        if not callable(learning_rate):
            check_learning_rate(learning_rate, "learning_rate")
            learning_rate = float(learning_rate)
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, name=name, **options)
        self.hyper = hyper
        self.buckets = buckets

    def build(self, variables: list[Any]) -> None:
        """Make the state: m, v and v_max per variable; r, sun and β2 per bucket; t and Σ log β2 per variable."""
        if self.built:
            return
        super().build(variables)
        names = unique_names([v.path.replace("/", ".") for v in variables], self.buckets)
        parts = partition(self.buckets, names, variables)
        self.bucket_names = list(parts.bucket_names)
        self._bucket_of = list(parts.bucket_of)
        self._m = self.add_optimizer_variables(variables, "m")
        self._v = self.add_optimizer_variables(variables, "v")
        if self.hyper.leak is not None:
            self._v_max = self.add_optimizer_variables(variables, "v_max")
        dtype = max(map(_wide, variables), default="float32")  # "float64" if there is one
        count = len(parts.bucket_names)
        self._ema, self._sun, self._beta2 = (self._scalars(count, k, dtype) for k in ("ema", "sun", "beta2"))
        self._t, self._log_beta2 = (self._scalars(len(variables), k, dtype) for k in ("t", "log_beta2"))
        self._skipped = self._scalars(count, "skipped", "int32")

    def _scalars(self, count: int, name: str, dtype: str) -> Any:
        return self.add_variable((count,), dtype=dtype, name=name)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """sun and β2 of every bucket at the last step: bucket name → {"sun": …, "beta2": …}.

        Zeros before the first step, and nothing before the optimizer knows the variables.
        """
        if not self.built:
            return {}
        sun, beta2 = (x.numpy().tolist() for x in (self._sun, self._beta2))
        return {name: {"sun": sun[b], "beta2": beta2[b]} for b, name in enumerate(self.bucket_names)}

    # NOTE: Keras decays weights before the step. Here the decay is part of it, since ⟨|θ|⟩ is that of θ before both.
    def _apply_weight_decay(self, variables: list[Any]) -> None: ...

    def _backend_update_step(self, grads: list[Any], trainable_variables: list[Any], learning_rate: Any) -> None:
        if not trainable_variables:
            return
        hyper, wide = self.hyper, self._ema.dtype
        indices = [self._get_variable_index(v) for v in trainable_variables]
        bucket_of = [self._bucket_of[i] for i in indices]
        number = {b: i for i, b in enumerate(dict.fromkeys(bucket_of))}
        present, place = list(number), [number[b] for b in bucket_of]
        lr = ops.cast(learning_rate, wide)
        grads = [ops.cast(g, _wide(v)) for g, v in zip(grads, trainable_variables, strict=True)]

        # n = √ Σ_p ||g(p)||² of the buckets that have a gradient
        members = _Members(place, len(present))
        norm = members.pooled([_norm(g, wide) for g in grads])
        exact, skip = hyper.bias_correction == "exact", hyper.nonfinite == "skip"
        old = rule.State(
            ema=ops.take(self._ema, present),
            step=ops.take(self._t, indices),
            log_beta2=ops.take(self._log_beta2, indices) if exact else None,
            skipped=ops.take(self._skipped, present) if skip else None,
        )
        mean_abs = ops.stack([_mean_abs(v, wide) for v in trainable_variables]) if hyper.adaptive_tiny else None
        new = rule.step(hyper, lr, norm, old, ops, members=members, mean_abs=mean_abs)

        for k, (i, g, theta) in enumerate(zip(indices, grads, trainable_variables, strict=True)):
            own = rule.Coefficients(*(_entry(x, k) for x in new.k))
            self._update(i, g, theta, own, None if new.updated_each is None else new.updated_each[k])
        _put(self._ema, present, new.state.ema)
        _put(self._t, indices, new.state.step)
        if exact:
            _put(self._log_beta2, indices, new.state.log_beta2)
        if skip:
            _put(self._skipped, present, new.state.skipped)
        for variable, value in ((self._sun, new.sun), (self._beta2, new.beta2)):
            kept = value if new.updated is None else ops.where(new.updated, value, ops.take(variable, present))
            _put(variable, present, kept)

    def _update(self, i: int, g: Any, variable: Any, k: rule.Coefficients, updated: Any) -> None:
        """The update of `rule.Coefficients` on one variable; `updated` False leaves all as they were."""
        wide = _wide(variable)
        c1, c2, rate, floor, limit, fade, leak = (None if x is None else ops.cast(x, wide) for x in k)
        theta = ops.cast(ops.stop_gradient(ops.convert_to_tensor(variable)), wide)
        m = ops.cast(self._m[i], wide)
        v = ops.cast(self._v[i], wide)
        # m = β1·m + (1-β1)·g,  v = β2·v + (1-β2)·g²
        m = m + c1 * (g - m)
        v = v + c2 * (g * g - v)
        new = [(self._m[i], m), (self._v[i], v)]
        if leak is not None:
            # v̂ = v_max = max(δ·v_max, v)
            v = _larger(leak * ops.cast(self._v_max[i], wide), v)
            new.append((self._v_max[i], v))
        # Δ = rate·m / (√v̂ + floor), clipped to ±limit
        delta = rate * m / (ops.sqrt(v) + floor)
        if limit is not None:
            delta = ops.clip(delta, -limit, limit)
        # θ = θ - (fade·θ + Δ)
        if fade is not None and self._use_weight_decay(variable):
            delta = fade * theta + delta
        new.append((variable, theta - delta))
        for target, value in new:
            value = ops.cast(value, target.dtype)
            self.assign(target, value if updated is None else ops.where(updated, value, ops.convert_to_tensor(target)))

    def get_config(self) -> dict[str, Any]:
        """What a saved model needs to make this optimizer again."""
        own = {k: v for k, v in dataclasses.asdict(self.hyper).items() if k != "weight_decay"}
        buckets = self.buckets if isinstance(self.buckets, str) else keras.saving.serialize_keras_object(self.buckets)
        return {**super().get_config(), **own, "buckets": buckets}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> KourkoutasBeta:
        """The optimizer of a saved model."""
        buckets = config.get("buckets")
        if isinstance(buckets, dict):
            config = {**config, "buckets": keras.saving.deserialize_keras_object(buckets, custom_objects)}
        made: KourkoutasBeta = super().from_config(config, custom_objects)
        return made


def _wide(variable: Any) -> str:
    """The dtype that a variable is updated in."""
    return "float64" if variable.dtype == "float64" else "float32"


# NOTE: keras.ops.maximum and keras.ops.mean compute in float32 where both arguments are float64.
def _larger(a: Any, b: Any) -> Any:
    return ops.where(a > b, a, b)


def _mean_abs(variable: Any, wide: str) -> Any:
    theta = ops.cast(ops.stop_gradient(ops.convert_to_tensor(variable)), wide)
    return ops.sum(ops.abs(theta)) / max(1, math.prod(theta.shape))


def _entry(x: Any, k: int) -> Any:
    """A variable's own coefficient, of one for each or one for all."""
    return x[k] if getattr(x, "ndim", 0) else x


class _Members:
    """Variables of a step and their buckets, for `rule.step`."""

    def __init__(self, place: list[int], count: int) -> None:
        self._place = place
        self._own: list[list[int]] = [[] for _ in range(count)]  # per bucket: its variables
        for k, b in enumerate(place):
            self._own[b].append(k)

    def spread(self, x: Any) -> Any:
        return ops.take(x, self._place)

    def largest(self, x: Any) -> Any:
        return ops.stack([ops.max(ops.stack([x[k] for k in own])) for own in self._own])

    def pooled(self, norms: list[Any]) -> Any:
        """√ Σ n² of the members of each bucket, without overflow."""
        return ops.stack([_norm(ops.stack([norms[k] for k in own]), norms[0].dtype) for own in self._own])


def _norm(g: Any, wide: str) -> Any:
    """||g|| without overflow: s·√ Σ (g/s)² with s the largest |g|."""
    g = ops.cast(g, wide)
    largest = ops.max(ops.abs(g)) if 0 not in g.shape else ops.zeros((), wide)
    scale = ops.where((largest > 0) & ops.isfinite(largest), largest, ops.ones_like(largest))
    return scale * ops.sqrt(ops.sum(ops.square(g / scale)))


def _put(variable: Any, places: list[int], values: Any) -> None:
    variable.assign(ops.scatter_update(variable, [[i] for i in places], values))
