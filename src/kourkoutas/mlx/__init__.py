"""Kourkoutas-β for MLX.

    from kourkoutas.mlx import KourkoutasBeta

    optimizer = KourkoutasBeta(learning_rate=1e-3)
    optimizer.update(model, grads)

The way of a step: `optimizer.py` (gather, check, and all that follows in its order), `layout.py` (gradients beside
parameters, and who has which entry of the state), `arithmetic.py` (norms), `rule.py` (the scalars), `arithmetic.py`
again (moments and parameters).

With `basis="eigen"` the step calls eigenbasis.py after the scalars: it adds the gradients to their factors, rotates
them, moves moments and parameters, and turns the bases.

NOTE: a parameter is known by its path in the tree (`layers.0.weight`), never by object identity: MLX makes new arrays
at every step.

NOTE: norms and the bucket statistics are float32, or float64 as soon as one parameter is. Half-precision parameters
are updated in float32 and rounded once; their moments are kept in the parameter's dtype, with a basis in float32. With
float64 parameters give `learning_rate` and `alpha` as float64 arrays, since MLX makes float32 of a Python number.
"""

try:
    import mlx.core
    import mlx.optimizers  # noqa: F401
except ImportError:
    raise ImportError("kourkoutas.mlx needs MLX: pip install 'kourkoutas-beta[mlx]'") from None

from kourkoutas.mlx.optimizer import KourkoutasBeta, Schedule

__all__ = ["KourkoutasBeta", "Schedule"]
