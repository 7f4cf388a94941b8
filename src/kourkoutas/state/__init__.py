"""The optimizer's state as one file that PyTorch, Optax and MLX all read: train in one, go on in another.

| framework | to a file                            | from a file                                    |
|-----------|--------------------------------------|------------------------------------------------|
| PyTorch   | `state.torch.save(optimizer, file)`  | `state.torch.load(file, optimizer)`, in place  |
| Optax     | `state.optax.save(opt_state, file)`  | `opt_state = state.optax.load(file, like)`     |
| MLX       | `state.mlx.save(optimizer, file)`    | `state.mlx.load(file, optimizer, params)`, in place |

`file.py` has the format, `match.py` says which state fits which parameters; the other modules translate between the
portable form and what a framework keeps. Importing `kourkoutas.state` imports no framework.

NOTE: what travels is what the rule needs: m, v, v_max, step counts, r, Σ log β2 and counts of
skipped steps. The parameters themselves, settings, schedules and recorded traces do not: parameters have each
framework's own files, and settings are given to the optimizer that loads.
"""

from kourkoutas.state.file import Portable, read, write

__all__ = ["Portable", "read", "write"]
