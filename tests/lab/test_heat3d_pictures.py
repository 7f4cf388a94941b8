"""Pictures of Testbed B."""

from __future__ import annotations

import numpy as np
import pytest

from kourkoutas.lab.testbeds import get
from kourkoutas.lab.testbeds.heat3d import geometry, network, pictures, reference

SETTINGS = get("heat3d").presets["smoke"]
PARAMS = {label: network.init(16, 4, seed) for seed, label in enumerate(("kbeta", "adam95"))}


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> reference.Solution:
    truth = reference.solve_case(geometry.case("paper"), (6, 24, 8))
    monkeypatch.setattr(reference, "solve", lambda case: truth)
    return truth


def test_every_picture_draws_and_is_described(coarse: reference.Solution) -> None:
    made = get("heat3d").figures(SETTINGS, PARAMS)  # type: ignore[attr-defined]
    assert len(made) == 5
    for figure, text in made:
        figure.canvas.draw()
        ink = np.asarray(figure.canvas.buffer_rgba()).astype(int) @ [1 << 16, 1 << 8, 1, 0]  # one number per colour
        assert len(np.unique(ink)) > 20
        assert text


def test_slices_show_the_reference_and_every_run(coarse: reference.Solution) -> None:
    fields = {label: pictures.temperature(p, coarse.nodes) for label, p in PARAMS.items()}
    figure = pictures.slices(coarse, fields)
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert [label for label in labels if label] == ["reference", "kbeta", "adam95", "T"]


def test_the_share_below_zero_is_by_volume(coarse: reference.Solution) -> None:
    inlet_half = np.where(coarse.nodes[..., 2] < 5, -1.0, 1.0)
    figure = pictures.below_zero(coarse, {"half": inlet_half})
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    # Nodes in z at 0, 1.25, ... count half at the ends: 3.5 of 8 lie below 5.
    assert texts[1] == "half: 43.75 % of the volume, lowest -1.000"


def test_no_runs_give_no_pictures() -> None:
    assert pictures.figures(SETTINGS, {}) == []


def test_the_laplacian_of_a_network_equals_central_differences() -> None:
    params = {name: p.astype(np.float64) * 2.5 for name, p in PARAMS["kbeta"].items()}
    x = np.array([[0.7, 1.0, 3.0], [0.3, 4.0, 8.0]])
    h = 1e-4

    def T(r: float, t: float, z: float) -> np.ndarray:
        return pictures.temperature(params, x + h * np.array([r, t, z]))

    r = x[:, 0]
    second = [(T(*e) - 2 * T(0, 0, 0) + T(*(-e))) / h**2 for e in np.eye(3)]
    expected = second[0] + (T(1, 0, 0) - T(-1, 0, 0)) / (2 * h) / r + second[1] / r**2 + second[2]
    np.testing.assert_allclose(pictures.laplacian(params, x), expected, rtol=1e-4)
