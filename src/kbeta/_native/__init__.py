"""The C kernel of the CPU step, if it was built at install; `step` is None where it was not.

It is optional: without a compiler the package installs all the same, and the PyTorch front end uses torch's own
kernels. The environment variable `KBETA_NATIVE=0` turns it off.
"""

from __future__ import annotations

import importlib
import os
from typing import Any


def _load() -> Any:
    if os.environ.get("KBETA_NATIVE", "1") == "0":
        return None
    try:
        return importlib.import_module("kbeta._native._step")
    except ImportError:
        return None


step: Any = _load()
