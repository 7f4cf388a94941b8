"""Kourkoutas-β for JAX, as an Optax gradient transformation.

    import optax
    from kourkoutas.optax import kourkoutas_beta

    solver = kourkoutas_beta(1e-3)          # use it like optax.adam(1e-3)

The way of a step, which JAX traces once: `optimizer.py` (gather, check, and all that follows in its order), `trees.py`
(gradients beside parameters, buckets, mesh axes), `arithmetic.py` (norms), `rule.py` (the scalars), `arithmetic.py`
again (moments and update of each parameter).

NOTE: buckets. They come from the key paths of the parameter tree (`{"enc": {"w": ...}}` → `enc.w`) and are worked out
while tracing; every bucket statistic is one array with an entry per bucket, whatever their number.

NOTE: missing gradients. A None leaf in the gradients where the parameters have an array means "no gradient": that
parameter, its moments and its step count stay as they are. Its update is None from `scale_by_kourkoutas_beta`, so that
later parts of a chain leave it alone too, and zero from `kourkoutas_beta`.

NOTE: dtypes. Norms, moving averages and bias corrections are float32, or float64 when a parameter is. Moments have the
parameter's dtype. Updates have the dtype of gradient and parameter together, as `optax.adam`'s have: float32 where one
is float32 and the other bfloat16. The arithmetic of 16-bit leaves is float32, rounded once.

NOTE: complex leaves. A complex number is a pair of real ones, as in torch.optim.Adam: real and imaginary parts have
their own second moments, and `max_ratio` bounds each part by itself. So a fixed β2 is Adam on the pairs, not
`optax.adam`, whose second moment of a complex leaf is one average of |g|². The norm n is the same either way.
"""

try:
    import jax  # noqa: F401
    import optax  # noqa: F401
except ModuleNotFoundError:
    raise ImportError("kourkoutas.optax needs JAX and Optax: pip install 'kourkoutas-beta[jax]'") from None

from kourkoutas.optax.eigenbasis import in_eigenbasis
from kourkoutas.optax.optimizer import (
    KourkoutasBetaEigenState,
    KourkoutasBetaState,
    kourkoutas_beta,
    pull,
    scale_by_kourkoutas_beta,
)
from kourkoutas.optax.trees import bucket_names

__all__ = [
    "KourkoutasBetaEigenState",
    "KourkoutasBetaState",
    "bucket_names",
    "in_eigenbasis",
    "kourkoutas_beta",
    "pull",
    "scale_by_kourkoutas_beta",
]
