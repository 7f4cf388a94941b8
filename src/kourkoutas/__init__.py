"""Kourkoutas-β: Adam with a second-moment memory that shortens when gradients spike.

Front ends are imported by name, so that `import kourkoutas` loads no framework:

    from kourkoutas.torch import KourkoutasBeta
"""

from importlib.metadata import PackageNotFoundError, version

from kourkoutas.rule import Hyper, NonFiniteGradient

try:
    __version__ = version("kourkoutas-beta")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["Hyper", "NonFiniteGradient", "__version__"]
