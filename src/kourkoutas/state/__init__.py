"""The optimizer's state as one file that PyTorch, Optax and MLX all read: train in one, go on in another.

`file.py` has the file and says which state fits which optimizer; `torch.py`, `optax.py` and `mlx.py` each have `save`
and `load`. Parameters, settings, schedules and recorded traces do not travel: parameters have each framework's own
files, and settings are given to the optimizer that loads. Importing `kourkoutas.state` imports no framework.
"""

from kourkoutas.state.file import Portable, read, write

__all__ = ["Portable", "read", "write"]
