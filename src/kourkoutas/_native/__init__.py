"""The C kernels, if they were built at install; None where they were not.

`step` is the optimizer's step on the CPU, `taylor` the loss of the laboratory's Testbed B. Both are optional: without a
compiler the package installs all the same, and what they do is done with torch's own kernels. The environment variable
`KBETA_NATIVE=0` turns them off.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def _load(name: str) -> Any:
    if os.environ.get("KBETA_NATIVE", "1") == "0":
        return None
    try:
        return importlib.import_module(f"kourkoutas._native.{name}")
    except ImportError:
        return None


step: Any = _load("_step")
taylor: Any = _load("_taylor")
