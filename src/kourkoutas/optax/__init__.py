"""Kourkoutas-β for JAX, as an Optax gradient transformation.

    import optax
    from kourkoutas.optax import kourkoutas_beta

    solver = kourkoutas_beta(1e-3)          # used like optax.adam(1e-3)

NOTE: buckets. They come from the key paths of the parameter tree (`{"enc": {"w": ...}}` → `enc.w`) and are worked out
while tracing; every bucket statistic is one array with an entry per bucket, whatever their number.

NOTE: missing gradients. A None leaf in the gradients where the parameters have an array means "no gradient": that
parameter, its moments and its step count stay as they are. Its update is None from `scale_by_kourkoutas_beta`, so that
later parts of a chain leave it alone too, and zero from `kourkoutas_beta`.

NOTE: dtypes. Norms, moving averages and bias corrections are float32, or float64 when a parameter is. Moments have the
parameter's dtype and updates the gradient's; the arithmetic of 16-bit leaves is float32, rounded once. A complex leaf
is a pair of real ones: the real and imaginary parts have their own second moments.
"""

try:
    import jax  # noqa: F401
    import optax  # noqa: F401
except ModuleNotFoundError:
    raise ImportError("kourkoutas.optax needs JAX and Optax: pip install 'kourkoutas-beta[jax]'") from None

from kourkoutas.optax.alias import kourkoutas_beta, scale_by_kourkoutas_beta
from kourkoutas.optax.loading import load_state
from kourkoutas.optax.recording import pull
from kourkoutas.optax.state import KourkoutasBetaState
from kourkoutas.optax.trees import bucket_names

__all__ = ["KourkoutasBetaState", "bucket_names", "kourkoutas_beta", "load_state", "pull", "scale_by_kourkoutas_beta"]
