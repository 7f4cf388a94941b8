"""What the documentation says about β2 in a spike, after it, and behind a clip, by the oracle."""

import numpy as np
import pytest

from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper

SPIKE = 1000.0


def beta2_of(norms):
    """β2 of one bucket at every step, for gradients of these norms."""
    oracle = Oracle({"w": np.zeros(4)}, Hyper())
    betas = []
    for norm in norms:
        oracle.step({"w": np.full(4, norm / 2)})
        betas.append(oracle.beta2["w"])
    return betas


def test_a_spike_shortens_the_memory_and_one_step_later_it_is_longer_than_before():
    betas = beta2_of([1.0] * 300 + [SPIKE] + [1.0] * 150)
    before, during, after = betas[299:302]
    assert before == pytest.approx(0.9395, abs=1e-6)
    # r = 0.93 + 0.07·1000 = 70.93, sun = 1000 / 1070.93; then r = 0.93·70.93 + 0.07 = 66.03, sun = 1 / 67.03
    assert during == pytest.approx(0.999 - 0.119 * 1000 / 1070.93, abs=1e-6)
    assert after == pytest.approx(0.999 - 0.119 / 67.0349, abs=1e-6)
    assert during < before < after
    assert betas[350] == pytest.approx(0.968, abs=5e-4)
    assert betas[400] == pytest.approx(0.9395, abs=2e-3)


def test_behind_a_clip_that_is_always_active_a_spike_does_not_move_beta2():
    norms = [3.0] * 300 + [SPIKE] + [3.0] * 10
    clipped = [min(norm, 1.0) for norm in norms]
    assert beta2_of(clipped)[299:] == pytest.approx([0.9395] * 12, abs=1e-6)


def test_behind_a_clip_at_ten_times_the_average_beta2_still_falls():
    hyper, average, clipped = Hyper(), 1.0, []
    for norm in [1.0] * 300 + [SPIKE]:
        clipped.append(min(norm, 10 * average))
        average = hyper.alpha * average + (1 - hyper.alpha) * clipped[-1]
    assert beta2_of(clipped)[-1] == pytest.approx(0.999 - 0.119 * 10 / 11.63, abs=1e-4)
