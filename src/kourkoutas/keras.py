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
from kourkoutas.buckets import Partition, check_buckets, partition, unique_names
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
        given = {name: options.pop(name) for name in rule.HYPER_NAMES if name in options}
        hyper = Hyper(**given, weight_decay=weight_decay or 0.0)
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
        self._parts = partition(self.buckets, names, variables)
        self.bucket_names = list(self._parts.bucket_names)
        self._m = self.add_optimizer_variables(variables, "m")
        self._v = self.add_optimizer_variables(variables, "v")
        if self.hyper.leak is not None:
            self._v_max = self.add_optimizer_variables(variables, "v_max")
        dtype = max(map(_wide, variables), default="float32")  # "float64" if there is one
        buckets = len(self.bucket_names)
        self._ema = self._scalars(buckets, "ema", dtype)
        self._sun = self._scalars(buckets, "sun", dtype)
        self._beta2 = self._scalars(buckets, "beta2", dtype)
        self._t = self._scalars(len(variables), "t", dtype)
        self._log_beta2 = self._scalars(len(variables), "log_beta2", dtype)
        self._skipped = self._scalars(buckets, "skipped", "int32")

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
        members = Members(self._parts, indices)
        rows, columns = members.rows, members.columns
        lr = ops.cast(learning_rate, wide)
        grads = [ops.cast(g, _wide(v)) for g, v in zip(grads, trainable_variables, strict=True)]

        # n = √ Σ_p ||g(p)||² of the buckets that have a gradient
        norm = _pooled(ops.stack([_norm(g, wide) for g in grads]), members)
        exact, skip = hyper.bias_correction == "exact", hyper.nonfinite == "skip"
        old = rule.State(
            ema=ops.take(self._ema, columns),
            step=ops.take(self._t, rows),
            log_beta2=ops.take(self._log_beta2, rows) if exact else None,
            skipped=ops.take(self._skipped, columns) if skip else None,
        )
        mean_abs = ops.stack([_mean_abs(v, wide) for v in trainable_variables]) if hyper.adaptive_tiny else None
        new = rule.step(hyper, lr, norm, old, ops, members=members, mean_abs=mean_abs)

        for k, (i, g, theta) in enumerate(zip(rows, grads, trainable_variables, strict=True)):
            own = rule.Coefficients(*(_entry(x, k) for x in new.k))
            self._update(i, g, theta, own, None if new.updated_each is None else new.updated_each[k])
        _put(self._ema, columns, new.state.ema)
        _put(self._t, rows, new.state.step)
        if exact:
            _put(self._log_beta2, rows, new.state.log_beta2)
        if skip:
            _put(self._skipped, columns, new.state.skipped)
        for variable, value in ((self._sun, new.sun), (self._beta2, new.beta2)):
            if new.updated is not None:
                value = ops.where(new.updated, value, ops.take(variable, columns))
            _put(variable, columns, value)

    def _update(self, i: int, g: Any, variable: Any, k: rule.Coefficients, updated: Any) -> None:
        """The update of `rule.Coefficients` on one variable; `updated` False leaves all as they were."""
        wide = _wide(variable)
        k = rule.Coefficients(*(None if x is None else ops.cast(x, wide) for x in k))
        theta = ops.cast(ops.stop_gradient(ops.convert_to_tensor(variable)), wide)
        m = ops.cast(self._m[i], wide)
        v = ops.cast(self._v[i], wide)
        # m = β1·m + (1-β1)·g,  v = β2·v + (1-β2)·g²
        m = m + k.c1 * (g - m)
        v = v + k.c2 * (g * g - v)
        new = [(self._m[i], m), (self._v[i], v)]
        v_hat = v
        if k.leak is not None:
            # v̂ = v_max = max(δ·v_max, v)
            v_hat = _larger(k.leak * ops.cast(self._v_max[i], wide), v)
            new.append((self._v_max[i], v_hat))
        # Δ = rate·m / (√v̂ + floor), clipped to ±limit
        delta = k.rate * m / (ops.sqrt(v_hat) + k.floor)
        if k.limit is not None:
            delta = ops.clip(delta, -k.limit, k.limit)
        # θ = θ - (fade·θ + Δ)
        if k.fade is not None and self._use_weight_decay(variable):
            delta = k.fade * theta + delta
        new.append((variable, theta - delta))
        for target, value in new:
            value = ops.cast(value, target.dtype)
            if updated is not None:
                value = ops.where(updated, value, ops.convert_to_tensor(target))
            self.assign(target, value)

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


class Members:
    """The variables of a step and their buckets.

    Attributes:
      bucket_of: for each variable, the number of its bucket.
      bucket_names: one name per bucket.
      rows: the places of the variables in the optimizer's arrays.
      columns: the places of the buckets in the optimizer's arrays.
    """

    def __init__(self, parts: Partition, rows: list[int]) -> None:
        buckets = [parts.bucket_of[i] for i in rows]
        self.rows = rows
        self.columns = list(dict.fromkeys(buckets))
        number = {column: i for i, column in enumerate(self.columns)}
        self.bucket_of = [number[column] for column in buckets]
        self.bucket_names = [parts.bucket_names[column] for column in self.columns]

    # From buckets to variables and back, as `rule.Members` has it.

    def spread(self, x: Any) -> Any:
        return ops.take(x, self.bucket_of)

    def largest(self, x: Any) -> Any:
        return ops.stack([ops.max(own) for own in self._split(x)])

    def total(self, x: Any) -> Any:
        return ops.stack([ops.sum(own) for own in self._split(x)])

    def _split(self, x: Any) -> list[Any]:
        """For each bucket, the entries of its variables.

        NOTE: on torch keras.ops.segment_sum and segment_max compute in float32, whatever the dtype.
        """
        own: list[list[Any]] = [[] for _ in self.columns]
        for k, bucket in enumerate(self.bucket_of):
            own[bucket].append(x[k])
        return [ops.stack(entries) for entries in own]


def _pooled(norms: Any, members: Members) -> Any:
    """√ Σ n² over the members of each bucket without overflow: s·√ Σ (n/s)² with s their largest n."""
    scale = _positive(members.largest(norms))
    return scale * ops.sqrt(members.total(ops.square(norms / members.spread(scale))))


def _positive(scale: Any) -> Any:
    """`scale` where one can divide by it, else 1."""
    return ops.where((scale > 0) & ops.isfinite(scale), scale, ops.ones_like(scale))


def _norm(g: Any, wide: str) -> Any:
    """||g|| without overflow: s·√ Σ (g/s)² with s the largest |g|."""
    g = ops.cast(g, wide)
    largest = ops.max(ops.abs(g)) if 0 not in g.shape else ops.zeros((), wide)
    scale = _positive(largest)
    return scale * ops.sqrt(ops.sum(ops.square(g / scale)))


def _put(variable: Any, places: list[int], values: Any) -> None:
    variable.assign(ops.scatter_update(variable, [[i] for i in places], values))
