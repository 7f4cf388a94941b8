"""Optax's own common checks for contributed optimizers: its test class, with its optimizers replaced by ours."""

import importlib
import sys
from unittest import mock

from absl.testing import parameterized

from kourkoutas.optax import kourkoutas_beta

OURS = [
    {"opt_name": "kourkoutas_beta", "opt_kwargs": {"learning_rate": 1e-2}},
    {
        "opt_name": "kourkoutas_beta",
        "opt_kwargs": {
            "learning_rate": 1e-2,
            "decay": 0.98,
            "max_ratio": 3.0,
            "adaptive_tiny": True,
            "bias_correction": "exact",
            "warmup_steps": 7,
            "weight_decay": 1e-5,
            "buckets": "global",
            "nonfinite": "skip",
            "diagnostics": True,
        },
    },
]


def _common_test():
    """`optax.contrib._common_test` with every grid over its optimizers turned into the same grid over ours."""
    product = parameterized.product
    entries = [dict(ours, wrapper_name=None, wrapper_kwargs=None) for ours in OURS]
    sys.modules.pop("optax.contrib._common_test", None)
    with mock.patch.object(parameterized, "product", lambda *_, **grid: product(entries, **grid)):
        module = importlib.import_module("optax.contrib._common_test")
    module._get_opt_factory = {"kourkoutas_beta": kourkoutas_beta}.__getitem__
    return module


class TestOptaxCommonChecks(_common_test().ContribTest):
    pass
