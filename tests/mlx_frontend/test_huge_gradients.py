"""Finite gradients whose sum of squares overflows float32: the norm is right, and training goes on as Adam's does."""

import mlx.core as mx
import numpy as np
import pytest

from kourkoutas.mlx import KourkoutasBeta, optimizer

MILLION = 1_000_000


@pytest.fixture(params=["float64", "float32"])
def wide(request, monkeypatch):
    """Sums in float64, and those for devices without it."""
    monkeypatch.setattr(optimizer, "widest", lambda: getattr(mx, request.param))


def norm_of(grads, **options):
    ours = KourkoutasBeta(1e-2, alpha=0.5, **options)
    params = ours.apply_gradients(grads, {name: mx.ones(g.shape) for name, g in grads.items()})
    return params, 2 * np.array(ours.state["ema"], np.float64)


@pytest.mark.usefixtures("wide")
def test_a_million_entries_of_1e18_have_the_norm_1e21():
    params, norm = norm_of({"big": mx.full((MILLION,), 1e18), "calm": mx.ones(4)}, nonfinite="skip")
    np.testing.assert_allclose(norm, [1e21, 2.0], rtol=2e-6)
    # The first step of Adam is the learning rate, here with b2 = 0.001 and 1-β2 = 0.001 + 0.119·n/(n + n/2).
    for p in params.values():
        np.testing.assert_allclose(np.array(p), 1 - 1e-2 * np.sqrt(0.001 / (0.001 + 0.119 / 1.5)), rtol=1e-6)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize(
    ("entries", "norm"),
    [([2e38, 0.0, 1e-3], 2e38), ([3e19, 4e19], 5e19), ([3.0, 4.0], 5.0), ([3e-15, 4e-15], 5e-15), ([0.0, 0.0], 0.0)],
    ids=str,
)
@pytest.mark.parametrize("buckets", ["parameter", "global"])
def test_norms_are_right_as_far_as_float32_reaches(buckets, entries, norm):
    _, got = norm_of({"w": mx.array(entries), "none": mx.zeros(3)}, buckets=buckets)
    assert np.isclose(got.max(), norm, rtol=1e-6)


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_still_seen(bad):
    params, _ = norm_of({"bad": mx.array([1.0, bad]), "good": mx.full((2,), 1e30)}, nonfinite="skip")
    assert mx.array_equal(params["bad"], mx.ones(2))
    assert mx.all(mx.isfinite(params["good"]))
