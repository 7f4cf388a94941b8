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
from kourkoutas.buckets import check_buckets, partition
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
    raise.
    """

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
        parts = partition(self.buckets, [v.path.replace("/", ".") for v in variables], variables)
        self.bucket_names = list(parts.names)
        self._bucket_of = list(parts.index)
        self._m = self.add_optimizer_variables(variables, "m")
        self._v = self.add_optimizer_variables(variables, "v")
        if self.hyper.leak is not None:
            self._v_max = self.add_optimizer_variables(variables, "v_max")
        dtype = max(map(_wide, variables))  # "float64" if there is one
        count = len(parts.names)
        self._ema, self._sun, self._beta2 = (self._scalars(count, k, dtype) for k in ("ema", "sun", "beta2"))
        self._t, self._log_beta2 = (self._scalars(len(variables), k, dtype) for k in ("t", "log_beta2"))
        self._skipped = self._scalars(count, "skipped", "int32")

    def _scalars(self, count: int, name: str, dtype: str) -> Any:
        return self.add_variable((count,), dtype=dtype, name=name)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """sun and β2 of every bucket at the last step: bucket name → {"sun": …, "beta2": …}; zeros before the first."""
        sun, beta2 = (x.numpy().tolist() for x in (self._sun, self._beta2))
        return {name: {"sun": sun[b], "beta2": beta2[b]} for b, name in enumerate(self.bucket_names)}

    # NOTE: Keras decays weights before the step. Here the decay is part of it, since ⟨|θ|⟩ is that of θ before both.
    def _apply_weight_decay(self, variables: list[Any]) -> None: ...

    def _backend_update_step(self, grads: list[Any], trainable_variables: list[Any], learning_rate: Any) -> None:
        hyper, wide = self.hyper, self._ema.dtype
        indices = [self._get_variable_index(v) for v in trainable_variables]
        bucket_of = [self._bucket_of[i] for i in indices]
        present = list(dict.fromkeys(bucket_of))
        place = [present.index(b) for b in bucket_of]
        lr = ops.cast(learning_rate, wide)
        grads = [ops.cast(g, _wide(v)) for g, v in zip(grads, trainable_variables, strict=True)]

        # n = √ Σ_p ||g(p)||² of the buckets that have a gradient
        norm = _pooled([_norm(g, wide) for g in grads], place, len(present))
        ema = ops.take(self._ema, present)
        t = ops.take(self._t, indices) + 1
        t_bucket = ops.stack(
            [ops.max(ops.stack([t[k] for k, b in enumerate(place) if b == j])) for j in range(len(present))]
        )
        r = rule.moving_average(hyper, ema, norm)
        sun = rule.sunspike(hyper, r, norm, t_bucket, ops)
        c2 = rule.forgetting(hyper, sun, t_bucket, ops)
        c2_each = ops.take(c2, place)
        log_beta2 = ops.take(self._log_beta2, indices) + ops.log1p(-c2_each)
        a1, b2 = rule.bias_corrections(hyper, t, log_beta2, ops)

        fine = ops.isfinite(norm) if hyper.nonfinite == "skip" else None
        fine_each = None if fine is None else ops.take(fine, place)
        for k, (i, g, theta) in enumerate(zip(indices, grads, trainable_variables, strict=True)):
            self._update(i, g, theta, lr, c2_each[k], a1[k], b2[k], None if fine_each is None else fine_each[k])
        for variable, places, new, which in (
            (self._ema, present, r, fine),
            (self._sun, present, sun, fine),
            (self._beta2, present, 1 - c2, fine),
            (self._t, indices, t, fine_each),
            (self._log_beta2, indices, log_beta2, fine_each),
        ):
            old = ops.take(variable, places)
            _put(variable, places, new if which is None else ops.where(which, new, old))
        if fine is not None:
            _put(self._skipped, present, ops.take(self._skipped, present) + ops.cast(~fine, "int32"))

    def _update(self, i: int, g: Any, variable: Any, lr: Any, c2: Any, a1: Any, b2: Any, fine: Any) -> None:
        """One variable: m, v, v̂ and θ as in the paper; `fine` False leaves all as they were."""
        hyper, wide = self.hyper, _wide(variable)
        lr, c2, a1, b2 = (ops.cast(x, wide) for x in (lr, c2, a1, b2))
        theta = ops.cast(ops.stop_gradient(ops.convert_to_tensor(variable)), wide)
        m = ops.cast(self._m[i], wide)
        v = ops.cast(self._v[i], wide)
        # m = β1·m + (1-β1)·g,  v = β2·v + (1-β2)·g²
        m = m + (1 - hyper.beta1) * (g - m)
        v = v + c2 * (g * g - v)
        new = [(self._m[i], m), (self._v[i], v)]
        if hyper.leak is not None:
            # v̂ = v_max = max(δ·v_max, v)
            v = _larger(hyper.leak * ops.cast(self._v_max[i], wide), v)
            new.append((self._v_max[i], v))
        # Δ = lr/a1 · m / (√(v̂/b2) + ε + tiny), clipped to ±lr·max_ratio
        denominator = ops.sqrt(v / b2) + hyper.eps
        if hyper.adaptive_tiny:
            denominator = denominator + hyper.tiny_denom * _larger(_mean_abs(theta), ops.ones((), wide))
        delta = lr / a1 * m / denominator
        if hyper.max_ratio is not None:
            delta = ops.clip(delta, -lr * hyper.max_ratio, lr * hyper.max_ratio)
        # θ = (1 - lr·λ)·θ - Δ
        if self.weight_decay and self._use_weight_decay(variable):
            theta = (1 - lr * self.weight_decay) * theta
        new.append((variable, theta - delta))
        for target, value in new:
            value = ops.cast(value, target.dtype)
            self.assign(target, value if fine is None else ops.where(fine, value, ops.convert_to_tensor(target)))

    def get_config(self) -> dict[str, Any]:
        """What a saved model needs to make this optimizer again."""
        own = {k: v for k, v in dataclasses.asdict(self.hyper).items() if k != "weight_decay"}
        buckets = self.buckets if isinstance(self.buckets, str) else keras.saving.serialize_keras_object(self.buckets)
        return {**super().get_config(), **own, "buckets": buckets}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> KourkoutasBeta:
        """The optimizer of a saved model."""
        buckets = config["buckets"]
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


def _mean_abs(theta: Any) -> Any:
    return ops.sum(ops.abs(theta)) / max(1, math.prod(theta.shape))


def _norm(g: Any, wide: str) -> Any:
    """||g|| without overflow: s·√ Σ (g/s)² with s the largest |g|."""
    g = ops.cast(g, wide)
    largest = ops.max(ops.abs(g)) if 0 not in g.shape else ops.zeros((), wide)
    scale = ops.where((largest > 0) & ops.isfinite(largest), largest, ops.ones_like(largest))
    return scale * ops.sqrt(ops.sum(ops.square(g / scale)))


def _pooled(norms: list[Any], place: list[int], count: int) -> Any:
    """√ Σ n² of the members of each of `count` buckets, without overflow."""
    return ops.stack(
        [
            _norm(ops.stack([n for n, b in zip(norms, place, strict=True) if b == j]), norms[0].dtype)
            for j in range(count)
        ]
    )


def _put(variable: Any, places: list[int], values: Any) -> None:
    variable.assign(ops.scatter_update(variable, [[i] for i in places], values))
