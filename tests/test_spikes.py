"""The measures of spike recovery."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("spikes", reason="benchmarks/ is not here")

import spikes


def test_recovery_counts_the_first_time_in_the_band_of_the_end():
    sizes = [1.0] * 10 + [5.0, 3.0, 1.05, 0.2, 0.5] + [1.0] * 35
    assert spikes.recovery(sizes, 10) == 2
    assert spikes.recovery([1.0] * 10 + [5.0] + [0.3] * 39, 10) == 1
    assert spikes.recovery([1.0] * 10 + [5.0] + [0.5, 1.5] * 20, 10) is None


def test_settled_counts_the_last_time_outside_the_band_of_the_calm_run():
    calm = np.linspace(1, 2, 50)
    sizes = calm.copy()
    assert spikes.settled(sizes, calm, 10) == 1
    sizes[[10, 11, 14]] = 9.0, 0.5, 3.0
    assert spikes.settled(sizes, calm, 10) == 5
    sizes[-1] = 0.0
    assert spikes.settled(sizes, calm, 10) is None
