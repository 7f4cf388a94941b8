"""Figures: what they draw, that nothing is clipped or empty, and that no global state is touched."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import image as images
from matplotlib.figure import Figure

from kourkoutas.lab.judging import stats, tables
from kourkoutas.lab.showing import figures

TABLE = Path(__file__).parent / "data" / "rare_trigger.csv"
NAN = math.nan


def values() -> dict[str, dict[stats.Seed, float]]:
    return {**tables.read_table(TABLE), "lion": {0: 0.002, 1: NAN, 2: math.inf, 3: 0.004}, "never": {0: NAN, 1: NAN}}


def comparison(log: bool = True) -> stats.Comparison:
    return stats.compare(values(), baseline="adam95", log=log, resamples=99)


def curves(points: int = 50) -> dict[str, dict[stats.Seed, figures.Curve]]:
    steps = np.arange(1, points + 1)
    fine = {s: (steps, (1 + 0.1 * s) * np.exp(-4 * steps / points)) for s in range(3)}
    broken = {s: (steps, np.where(steps > points // 2, NAN, 1.0 + s)) for s in range(2)}
    return {"kbeta": fine, "adam95": {**fine, 7: broken[0]}, "lion": broken}


def traces(fixed: bool = False) -> list[figures.TraceData]:
    rng = np.random.default_rng(0)
    sun = np.full((80, 4), 0.5) if fixed else rng.uniform(0.1, 0.9, (80, 4))
    sun[:5, 0] = NAN
    return [figures.TraceData(np.arange(10, 810, 10), sun, 0.999 - 0.119 * sun)]


DRAWN: dict[str, Callable[[], Figure]] = {
    "curves": lambda: figures.loss_curves(curves()),
    "curves on a linear axis": lambda: figures.loss_curves(curves(), log=False),
    "pairs": lambda: figures.pairs(comparison().contrasts, log=True),
    "pairs of accuracies": lambda: figures.pairs(comparison(log=False).contrasts, higher_is_better=True),
    "endpoints": lambda: figures.endpoints(values(), log=True),
    "a long label": lambda: figures.endpoints(values(), log=True, label="mean held-out loss of the last steps " * 3),
    "forest of ratios": lambda: figures.forest(comparison()),
    "forest of differences": lambda: figures.forest(comparison(log=False)),
    "violins": lambda: figures.violins(traces(), title="kbeta"),
    "violins of a fixed β2": lambda: figures.violins(traces(fixed=True)),
    "densities": lambda: figures.densities(traces(), title="kbeta"),
    "densities of a fixed β2": lambda: figures.densities(traces(fixed=True)),
}


def words(figure: Figure) -> str:
    return " | ".join(t.get_text() for t in figure.findobj(mpl.text.Text) if t.get_visible() and t.get_text())


def lines(figure: Figure) -> list[np.ndarray]:
    return [np.asarray(line.get_xydata()) for axes in figure.axes for line in axes.get_lines()]


@pytest.mark.parametrize("name", DRAWN)
def test_nothing_is_clipped_or_empty(name: str) -> None:
    pixels = images.imread(io.BytesIO(figures.png(DRAWN[name](), dpi=60)))[..., :3]
    assert pixels.std() > 0.03
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert (edge == 1).all()  # ink on the border would be cut


@pytest.mark.parametrize("name", DRAWN)
def test_every_panel_has_its_labels(name: str) -> None:
    figure = DRAWN[name]()
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert shown
    for axes in shown:
        assert axes.get_xlabel() or axes.get_ylabel() or axes.get_title()


def test_the_same_figure_gives_the_same_bytes() -> None:
    assert figures.svg(DRAWN["forest of ratios"]()) == figures.svg(DRAWN["forest of ratios"]())


def test_global_settings_are_left_alone_and_pyplot_is_not_imported() -> None:
    before = dict(mpl.rcParams)
    figures.png(figures.loss_curves(curves()), dpi=40)
    assert dict(mpl.rcParams) == before
    code = "import sys, kourkoutas.lab.showing.figures; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (lambda: figures.loss_curves({}), "No loss curves"),
        (lambda: figures.loss_curves({"a": {0: ([1, 2], [NAN, NAN])}}), "No loss curves"),
        (lambda: figures.pairs([]), "no pairs"),
        (lambda: figures.endpoints({"a": {}}), "No run has reached"),
        (lambda: figures.forest(stats.compare_pairs({"a": {0: 1.0}}, [])), "nothing to compare"),
        (lambda: figures.violins([]), "No trace"),
        (lambda: figures.densities([figures.TraceData([1], [[NAN]], [[NAN]])]), "No trace"),
    ],
)
def test_missing_data_is_said_in_words(figure: Callable[[], Figure], text: str) -> None:
    assert text in words(figure())


def test_the_mean_curve_is_that_of_the_log_losses() -> None:
    two = {"a": {0: ([1, 2], [1.0, 100.0]), 1: ([1, 2], [4.0, 10_000.0])}}
    right = figures.loss_curves(two).axes[1]
    mean = next(np.asarray(line.get_xydata()) for line in right.get_lines() if len(line.get_xydata()))
    assert mean[:, 1] == pytest.approx([2.0, 1000.0])
    band = right.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(1000 * 10 ** (2 / math.sqrt(2)))  # sd of {2, 4} is √2


def test_a_diverged_curve_is_cut_marked_and_counted() -> None:
    figure = figures.loss_curves({"a": {0: ([1, 2, 3], [1.0, 2.0, NAN]), 1: ([1, 2, 3], [1.0, 2.0, 4.0])}})
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    assert [tuple(map(float, *line.get_xydata())) for line in crosses] == [(2.0, 2.0)]
    assert "a (1 of 2 diverged ×)" in words(figure)
    mean = [line.get_ydata() for line in figure.axes[1].get_lines() if len(line.get_ydata())]
    assert list(mean[0]) == [1.0, 2.0, 4.0]


def test_a_curve_that_is_never_finite_is_counted_beside_the_others() -> None:
    figure = figures.loss_curves({"a": {0: ([1, 2], [NAN, NAN]), 1: ([1, 2], [1.0, 2.0])}})
    assert "a (1 of 2 diverged ×)" in words(figure)


def test_long_curves_are_averaged_in_blocks_and_say_so() -> None:
    steps = np.arange(1, 4001)
    figure = figures.loss_curves({"a": {0: (steps, steps % 2.0)}}, log=False)
    drawn = figure.axes[0].get_lines()[0].get_ydata()
    assert len(drawn) == 400
    assert np.allclose(drawn, 0.5)
    assert "means of up to 10 records" in words(figure)


def test_seeds_recorded_at_different_steps_are_averaged_where_all_have_values() -> None:
    figure = figures.loss_curves(
        {"a": {0: ([0, 10, 20], [0.0, 1.0, 2.0]), 1: ([0, 5, 10], [2.0, 2.0, 2.0])}}, log=False
    )
    mean = next(line.get_xydata() for line in figure.axes[1].get_lines() if len(line.get_xydata()))
    assert np.asarray(mean).tolist() == [[0.0, 1.0], [10.0, 1.5]]


def test_diverged_runs_sit_on_a_labelled_band_on_the_worse_side() -> None:
    for higher, side in ((False, 1), (True, -1)):
        figure = figures.endpoints({"a": {0: 1.0, 1: 2.0, 2: NAN}}, higher_is_better=higher)
        (axes,) = figure.axes
        cross = next(line for line in axes.get_lines() if line.get_marker() == "x" and len(line.get_ydata()))
        assert side * float(cross.get_ydata()[0]) > side * (2.0 if side > 0 else 1.0)
        assert "diverged" in words(figure)


def test_pair_lines_join_the_two_values_of_a_seed() -> None:
    found = stats.compare({"new": {0: 1.0, 1: 3.0}, "old": {0: 2.0, 1: 2.5}}, baseline="old", resamples=99)
    drawn = [xy for xy in lines(figures.pairs(found.contrasts)) if len(xy) == 3]
    assert sorted(xy[:2, 1].tolist() for xy in drawn) == [[2.0, 1.0], [2.5, 3.0]]


def test_the_forest_shows_ratio_interval_and_what_was_left_out() -> None:
    text = words(figures.forest(comparison()))
    for expected in ("kbeta vs adam95", "1.099 [1.045, 1.155]", "2 diverged left out", "no pair of finite runs"):
        assert expected in text


def test_density_columns_sum_to_one_where_there_is_data() -> None:
    figure = figures.densities(traces())
    for axes in figure.axes[:2]:
        share = axes.collections[0].get_array()
        assert np.allclose(np.asarray(share).sum(axis=0), 1)


def test_the_papers_arms_keep_their_colours_and_no_two_arms_look_alike() -> None:
    names = ["kbeta", "adam95", "adam999", *(f"rival{i}" for i in range(9))]
    found = figures.looks(names)
    assert found["kbeta"] == figures.looks(["x", "kbeta"])["kbeta"]
    assert len({tuple(look.values()) for look in found.values()}) == len(names)


@pytest.mark.parametrize(
    ("data", "suits"),
    [([1, 10], False), ([1, 100], True), ([0, 100], False), ([-1, 5], False), ([], False), ([NAN], False)],
)
def test_a_log_axis_is_chosen_for_positive_values_that_span_decades(data: list[float], suits: bool) -> None:
    assert figures.log_suits(data) is suits
