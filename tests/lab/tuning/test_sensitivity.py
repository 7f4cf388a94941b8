"""Sensitivity to the learning rate: numbers checked by hand, and the figure."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest

from kourkoutas.lab.optimizers.looks import looks_of
from kourkoutas.lab.showing import tuning as drawing
from kourkoutas.lab.tuning.sensitivity import Sensitivity, sensitivities
from kourkoutas.lab.tuning.trials import Tried

NAN = math.nan


def tried(*means: float, at: tuple[float, ...] = (1e-3, 1e-2, 1e-1, 1.0)) -> list[Tried]:
    return [Tried({"lr": lr}, (x - 0.1, x, x + 0.1)) for lr, x in zip(at, means, strict=True)]


def of(*means: float) -> Sensitivity:
    return sensitivities({"kbeta": tried(*means)}, "lr")["kbeta"]


def test_the_range_about_as_good_as_the_best_is_that_of_its_neighbours_within_the_margin() -> None:
    found = of(2.0, 2.09, 9.0, 2.05)
    assert (found.best, found.low, found.high) == (1e-3, 1e-3, 1e-2)
    assert found.ratio == pytest.approx(10)
    assert (found.open_below, found.open_above) == (True, False)
    assert of(2.0, 2.11, 9.0, 2.05).ratio == 1


def test_sensitivity_is_the_mean_of_what_is_lost_against_the_best_value() -> None:
    # (3-1 + 0 + 2-1 + 5-1)/4
    assert of(3.0, 1.0, 2.0, 5.0).sensitivity == pytest.approx(7 / 4)


def test_a_diverged_value_counts_as_the_worst_of_all_arms() -> None:
    both = sensitivities({"a": tried(3.0, 1.0, 2.0, NAN), "b": tried(8.0, 7.0, 6.0, 6.5)}, "lr")
    # (3-1 + 0 + 2-1 + 8-1)/4
    assert both["a"].sensitivity == pytest.approx(10 / 4)
    assert both["a"].points[-1].diverged == 3
    assert math.isinf(both["a"].points[-1].mean)


def test_an_arm_that_always_diverged_has_no_sensitivity() -> None:
    found = of(NAN, NAN, NAN, NAN)
    assert found.sensitivity is None
    assert found.ratio == 1


def test_scores_of_which_more_is_better_give_the_same_sensitivity() -> None:
    low = of(-0.5, -0.9, -0.88, -0.2)
    high = sensitivities({"kbeta": tried(0.5, 0.9, 0.88, 0.2)}, "lr", maximize=True)["kbeta"]
    assert high.sensitivity == pytest.approx(low.sensitivity)
    assert (high.best, high.low, high.high) == (1e-2, 1e-2, 1e-1)
    assert [point.mean for point in high.points] == pytest.approx([0.5, 0.9, 0.88, 0.2])


def test_the_spread_of_a_value_is_that_of_its_seeds() -> None:
    (point, *_) = of(3.0, 1.0, 2.0, 5.0).points
    assert (point.low, point.mean, point.high, point.runs) == (2.9, pytest.approx(3.0), 3.1, 3)


def test_the_figure_shows_every_value_the_choice_and_what_diverged() -> None:
    found = sensitivities({"kbeta": tried(3.0, 1.0, 2.0, NAN), "a<b>&": tried(2.0, 2.0, 1.5, 4.0)}, "lr")
    drawn = drawing.draw(list(found.values()), looks_of(list(found)), "bits per <character>")
    root = ET.fromstring(str(drawn.svg))
    titles = [node.text or "" for node in root.iter("title")]
    assert len(titles) == 8
    assert sum(title.startswith("a<b>&, lr") for title in titles) == 4
    classes = [node.get("class") for node in root.iter()]
    assert classes.count("chosen") == 2
    assert classes.count("cross") == 1
    assert drawn.title == "bits per <character>, log scale, against lr"


def test_nothing_tried_is_not_drawn() -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        drawing.draw([], {}, "loss")


def test_values_at_which_runs_explode_leave_the_good_ones_apart_in_the_figure() -> None:
    values = tuple(10.0**k for k in range(-6, 0))
    means = {"kbeta": (1e-3, 1e-5, 1e-6, 1e-4, 1e-2, 1e20), "adam95": (1e-3, 1e-4, 1e-5, 1e-3, 1e12, 1e24)}
    runs = {
        arm: [Tried({"lr": lr}, (x, x, x)) for lr, x in zip(values, own, strict=True)] for arm, own in means.items()
    }
    found = sensitivities(runs, "lr")
    drawn = drawing.draw(list(found.values()), looks_of(list(found)), "loss")
    heights = [float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)" r="3.5"', drawn.svg)]
    best = {"kbeta": heights[2], "adam95": heights[8]}
    assert best["kbeta"] > best["adam95"] + 20
    assert "↑ to 1e24" in drawn.svg
