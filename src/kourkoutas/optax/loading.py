"""Reading a saved state, also one of version 0.1.

| version | step counts                                                        |
|---------|--------------------------------------------------------------------|
| 0.1     | `count`, (parameters,): the steps of each parameter                |
| 0.2     | `count`, (): calls of `update`; `missed`, (parameters,): count - t |

The trace of 0.1 has no norms: NaN stands for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kourkoutas.optax.trees import PyTree
from kourkoutas.trace import with_norms


def load_state(saved: PyTree, like: optax.OptState) -> optax.OptState:
    """A saved state, of this version or of 0.1, in the structure of `like`; training goes on with the same numbers.

    Args:
      saved: nested dictionaries, lists and tuples of arrays under the names of the state's fields: what
        `flax.serialization.msgpack_restore` returns, what orbax restores without a target, or a state itself.
      like: the state that `init` makes for the same parameters and settings, also through `jax.eval_shape`.

    Returns:
      A state like `like`, with its dtypes and the saved values.

    Example:
      >>> from kourkoutas.optax import kourkoutas_beta
      >>> params = {"w": jnp.ones(3)}
      >>> solver = kourkoutas_beta(1e-3)
      >>> saved = {"0": {"count": np.array([7]), "mu": params, "nu": params, "ema": np.ones(1)}}
      >>> int(optax.tree.get(load_state(saved, solver.init(params)), "count"))
      7
    """
    saved = _upgraded(saved)
    treedef: Any
    leaves, treedef = jax.tree_util.tree_flatten_with_path(like)
    return treedef.unflatten([_leaf(saved, path, x) for path, x in leaves])


def _upgraded(node: PyTree) -> PyTree:
    """`node` with every state of version 0.1 in the form of this one."""
    if hasattr(node, "_asdict"):
        node = node._asdict()
    if isinstance(node, Mapping):
        if not {"count", "mu", "nu", "ema"} <= set(node):
            return {key: _upgraded(child) for key, child in node.items()}
        if node.get("ring") is not None:
            node = {**node, "ring": with_norms(node["ring"])}
        if node.get("missed") is not None:
            return node
        # t = count - missed, with count the steps of the parameter that took most
        t = np.asarray(node["count"])
        count = t.max(-1, initial=0)
        return {**node, "count": count, "missed": count[..., None] - t}
    if isinstance(node, (list, tuple)):
        return [_upgraded(child) for child in node]
    return node


def _leaf(saved: PyTree, path: Sequence[Any], like: Any) -> Any:
    """The array of `saved` at `path`, with the dtype of `like`."""
    node = saved
    for key in path:
        name = next(getattr(key, kind) for kind in ("name", "key", "idx") if hasattr(key, kind))
        try:
            if isinstance(node, Mapping):
                node = node[name] if name in node else node[str(name)]
            elif isinstance(node, (list, tuple)):
                node = node[name]
            else:
                node = getattr(node, str(name))
        except (KeyError, IndexError, TypeError, AttributeError):
            node = None
    where = jax.tree_util.keystr(tuple(path))
    if node is None:
        raise ValueError(
            f"`saved` has nothing at {where}: load it with the parameters and the settings it was saved with"
        )
    if np.shape(node) != np.shape(like):
        raise ValueError(
            f"`saved` has shape {np.shape(node)} at {where} and `like` has {np.shape(like)}: "
            "load it with the parameters, buckets and settings it was saved with"
        )
    dtype = jnp.result_type(like)
    return node if jnp.issubdtype(dtype, jax.dtypes.extended) else jnp.asarray(node, dtype)
