"""Figures: that they show the numbers they are given, at the places of their axes, and say what is missing."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kourkoutas.lab.judging.comparing import Comparison
from kourkoutas.lab.optimizers import looks
from kourkoutas.lab.showing import curves, distributions, drawing, effects, maps
from kourkoutas.lab.showing.curves import Course
from tests.lab import made_study

NAN = math.nan


def course(losses: Sequence[float], steps: Sequence[float] | None = None, **more: bool) -> Course:
    at = range(1, len(losses) + 1) if steps is None else steps
    return Course(np.array(list(at), float), np.array(losses, float), **more)


def panels(courses: curves.Courses, **more: Any) -> list[drawing.Drawing]:
    return curves.panels(courses, looks.looks_of(list(courses)), lambda arm, seed: f"run-{arm}-{seed}", **more)


def judged(tmp_path: Path, ends: made_study.Ends, **how: bool) -> Comparison:
    return made_study.analysed(made_study.own(tmp_path / "out", ends, **how)).primary


def test_median_and_band_are_those_of_the_seeds() -> None:
    found = curves.summarise([course([4, 40]), course([1, 10]), course([2, 20]), course([3, 30]), course([5, 50])])
    assert found is not None
    assert found.median.tolist() == [3, 30]
    assert (found.low.tolist(), found.high.tolist()) == ([2, 20], [4, 40])


def test_a_diverged_run_counts_as_the_worst_from_where_it_diverged() -> None:
    found = curves.summarise([course([1, 1, 1]), course([2, 2, 2]), course([0.5, 0.5], diverged=True)])
    assert found is not None
    assert found.median.tolist() == [1, 1, 2]


def test_where_most_runs_have_diverged_there_is_no_median() -> None:
    found = curves.summarise([course([1, 1, 1]), course([2], diverged=True), course([3], diverged=True)])
    assert found is not None
    assert found.median[0] == 2
    assert np.isnan(found.median[1:]).all()


def test_a_run_that_goes_on_is_no_part_of_the_median_of_finished_ones() -> None:
    found = curves.summarise([course([1, 1, 1]), course([9], going=True)])
    assert found is not None
    assert found.median.tolist() == [1, 1, 1]
    alone = curves.summarise([course([9, 8], going=True), course([7, 6, 5], going=True)])
    assert alone is not None
    assert alone.steps.tolist() == [1, 2]  # as far as both have come
    assert alone.median.tolist() == [8, 7]


def test_seeds_recorded_at_different_steps_are_compared_where_all_have_values() -> None:
    found = curves.summarise([course([0, 1, 2], [0, 10, 20]), course([2, 2, 2], [0, 5, 10])])
    assert found is not None
    assert found.steps.tolist() == [0, 5, 10]
    assert found.median.tolist() == [1, 1.25, 1.5]


def test_long_curves_are_averaged_in_blocks_and_a_gap_is_no_divergence() -> None:
    thin = curves.thinned(course([k % 2 for k in range(3200)]))
    assert len(thin.losses) == curves.MOST_POINTS
    assert np.allclose(thin.losses, 0.5)
    gap = curves.thinned(course([1, 2, NAN, 3]))
    assert (gap.steps.tolist(), gap.losses.tolist()) == ([1, 2, 4], [1, 2, 3])
    assert not gap.diverged
    assert curves.thinned(course([1, NAN], diverged=True)).diverged


def test_the_panels_are_all_arms_and_one_per_arm_with_diverged_runs_crossed_and_counted() -> None:
    arms = {"kbeta": {0: course(np.geomspace(1, 0.001, 50).tolist())}, "lion": {0: course([1.0] * 20, diverged=True)}}
    drawn = panels(arms)
    assert [one.title for one in drawn] == [
        "All optimizers: training loss, log scale",
        "K-β: 1 run",
        "Lion: 1 run, 1 diverged ×",
    ]
    assert ['class="cross"' in one.svg for one in drawn] == [False, False, True]
    assert panels(arms, runs={"kbeta": 3, "lion": 1})[1].title == "K-β: 1 of 3 runs"


def test_a_few_steps_of_a_loss_next_to_0_do_not_flatten_the_rest_but_an_end_there_is_shown() -> None:
    losses = np.geomspace(1, 0.1, 100)
    losses[50] = 1e-39
    assert curves.above_dips(losses, [losses[-1]]).min() > 1e-4
    assert curves.above_dips(losses, [1e-12]).min() == 1e-12
    assert (curves.above_dips(losses, [0.1])[:50] == losses[:50]).all()


def test_without_curves_there_are_no_panels() -> None:
    assert panels({}) == []
    assert panels({"a": {0: course([NAN, NAN])}}) == []


def test_every_run_is_a_mark_at_its_value_and_a_diverged_one_a_cross_on_the_worse_side(tmp_path: Path) -> None:
    for higher in (False, True):
        ends = {"a": {0: 1.0, 1: 2.0, 2: 3.0, 3: NAN}, "b": {0: 2.0, 1: NAN, 2: NAN, 3: NAN}}
        found = judged(tmp_path / str(higher), ends, higher_is_better=higher)
        drawn = distributions.rows(found, looks.looks_of(["a", "b"]), lambda arm, seed: f"{arm}-{seed}")
        assert drawn is not None
        marks = {
            (arm, value): float(x)
            for arm, value, x in re.findall(r"<title>(\w), seed \d: ([\d.]+)</title><circle cx=\"([\d.]+)\"", drawn.svg)
        }
        assert len(marks) == 4
        assert marks["a", "2"] == marks["b", "2"] == pytest.approx((marks["a", "1"] + marks["a", "3"]) / 2, abs=0.11)
        cross = re.findall(r'a, seed 3: diverged</title><path d="M([\d.]+)', drawn.svg)[0]
        worst = marks["a", "1"] if higher else marks["a", "3"]
        assert (float(cross) < worst) if higher else (float(cross) > worst)
        assert 'href="#a-3"' in drawn.svg


def test_pair_lines_join_the_two_values_of_a_seed_and_tell_the_better(tmp_path: Path) -> None:
    found = judged(tmp_path, {"new": {0: 1.0, 1: 3.0, 2: 2.0}, "old": {0: 2.0, 1: 2.5, 2: 2.0}})
    (drawn,) = distributions.pairs(found, lambda arm, seed: "runs")
    assert "seed 0: old 2, new 1: better" in drawn.svg
    assert "seed 1: old 2.5, new 3: worse" in drawn.svg
    assert "seed 2: old 2, new 2: equal" in drawn.svg
    assert drawn.title == "new better on 1 of 3 seeds"


def test_the_effect_plot_puts_estimates_and_ends_at_their_percentages(tmp_path: Path) -> None:
    new, old = [1.4, 1.6, 1.5] * 2, [2.0, 2.5, 2.3] * 2
    found = judged(tmp_path, {"new": dict(enumerate(new)), "old": dict(enumerate(old))})
    (c,) = found.contrasts
    assert c.percent is not None
    assert c.percent.interval is not None
    drawn = effects.plot([found])
    assert drawn is not None
    (at,) = re.findall(r'<circle cx="([\d.]+)"', drawn.svg)
    bar = re.search(r'<line x1="([\d.]+)" x2="([\d.]+)"[^>]*class="interval"', drawn.svg)
    assert bar is not None
    ticks = re.findall(r'<text x="([\d.]+)"[^>]*>(\d+) %(?: lower)?</text>', drawn.svg)
    places = {float(value): float(x) for x, value in ticks}
    (a, xa), *_, (b, xb) = sorted(places.items())
    per_percent = (xb - xa) / (b - a)
    for x, percent in ((at, c.percent.value), (bar[1], c.percent.interval.low), (bar[2], c.percent.interval.high)):
        assert percent is not None
        assert float(x) == pytest.approx(xa + per_percent * (percent - a), abs=0.5)


def test_effects_beyond_a_factor_of_2_stand_on_an_axis_of_ratios(tmp_path: Path) -> None:
    new = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]
    ends = {"kbeta": new, "adam95": [150 * x for x in new], "adam999": [24_000 * x for x in new[::-1]]}
    found = judged(tmp_path, {arm: dict(enumerate(own)) for arm, own in ends.items()}, log=True)
    drawn = effects.plot([found])
    assert drawn is not None
    near, far = (float(x) for x in re.findall(r'<circle cx="([\d.]+)"', drawn.svg))
    (zero,) = set(re.findall(r'<line x1="([\d.]+)"[^>]*class="zero"', drawn.svg))
    # log10 of 150 and of 24,000, from no difference
    assert (near - float(zero)) / (far - float(zero)) == pytest.approx(math.log10(150) / math.log10(24_000), abs=0.01)
    assert "100× lower</text>" in drawn.svg
    assert "%</text>" not in drawn.svg


def test_ratios_whose_interval_ends_beyond_a_factor_of_2_stand_on_an_axis_of_ratios(tmp_path: Path) -> None:
    times = [0.2, 4.0, 0.5, 3.0, 1.2, 0.9]
    ends = {"kbeta": dict(enumerate(times)), "adam95": dict.fromkeys(range(6), 1.0)}
    found = judged(tmp_path, ends, log=True)
    (row,) = effects.rows_of(found)
    assert row.estimate is not None
    # log10 of how many times lower: the geometric mean of the ratios, between factors on both sides
    assert row.estimate.value == pytest.approx(-np.mean(np.log10(times)), abs=1e-6)
    assert row.estimate.low < -math.log10(2) < math.log10(2) < row.estimate.high
    assert re.search(r"% (lower|higher) \[[\d.]+× lower, [\d.]+× higher\]", row.words)


def test_a_comparison_that_lost_its_size_leaves_the_others_in_percent(tmp_path: Path) -> None:
    ends = {"kbeta": [1.0, 1.1, 0.9, 1.05], "adam95": [1.25, 1.3, 1.2, 1.28], "adam999": [NAN] * 4}
    found = judged(tmp_path, {arm: dict(enumerate(own)) for arm, own in ends.items()})
    assert effects.unit_of(found) == "percent"
    assert "% lower" in effects.rows_of(found)[0].words


def test_an_interval_far_beyond_the_estimates_is_cut_with_an_arrow(tmp_path: Path) -> None:
    new, old = [1.0, 40.0, 0.02] * 2, [1.0, 0.1, 0.5] * 2
    drawn = effects.plot([judged(tmp_path, {"new": dict(enumerate(new)), "old": dict(enumerate(old))}, log=True)])
    assert drawn is not None
    assert 'class="arrow"' in drawn.svg


def test_what_has_no_verdict_is_drawn_without_an_interval(tmp_path: Path) -> None:
    found = judged(tmp_path, {"new": {0: 1.0, 1: 1.2, 2: 1.1}, "old": {0: 2.0, 1: 2.5, 2: 2.3}})
    (row,) = effects.rows_of(found)
    assert row.estimate is not None
    assert row.estimate.low == row.estimate.value == row.estimate.high
    assert row.words == "2.1× lower, no verdict"


def traces(runs: int = 2) -> list[maps.TraceData]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(runs):
        sun = rng.uniform(0.4, 0.6, (800, 3))
        sun[500, 1] = 0.95
        sun[:5, 0] = NAN
        found.append(maps.TraceData(np.arange(1, 801), sun, 0.999 - 0.119 * sun, ["a", "b", "c"]))
    return found


def test_a_spike_of_one_step_is_seen_in_the_cell_of_its_bucket_and_stretch() -> None:
    grid = maps.grid_of(traces(), maps.SUN)
    assert grid.names == ["a", "b", "c"]
    row, column = np.unravel_index(np.nanargmax(grid.cells), grid.cells.shape)
    assert grid.names[row] == "b"
    assert grid.edges[column] < 501 <= grid.edges[column + 1]
    assert grid.cells[row, column] == pytest.approx(0.95)
    lowest = maps.grid_of(traces(), maps.BETA2).cells
    assert np.unravel_index(np.nanargmin(lowest), lowest.shape) == (row, column)


def test_a_bucket_without_a_gradient_has_no_value() -> None:
    one = maps.TraceData([1, 2], [[NAN, 0.5], [NAN, 0.5]], [[NAN, 0.9], [NAN, 0.9]], ["a", "b"])
    cells = maps.grid_of([one], maps.SUN).cells
    assert np.isnan(cells[0]).all()
    assert (cells[1] == 0.5).all()


def test_of_very_many_buckets_those_that_spike_most_are_shown() -> None:
    sun = np.full((50, 100), 0.5)
    sun[20, 77] = 0.9
    names = [f"bucket{k}" for k in range(100)]
    drawn = maps.buckets([maps.TraceData(np.arange(50), sun, 1 - sun, names)], maps.SUN, "kbeta")
    assert drawn is not None
    assert ">bucket77<" in drawn.svg
    assert drawn.svg.count("bucket") >= maps.MOST_BUCKETS
    assert "the 40 of 100 buckets that spike most" in drawn.title


def test_one_bucket_alone_has_a_map_too() -> None:
    one = maps.TraceData([1, 2], [[0.5], [0.9]], [[0.94], [0.89]], ["everything"])
    drawn = maps.drawings([one], looks.looks_of(["kbeta"])["kbeta"])
    assert [picture.title for picture in drawn] == ["K-β: sun by bucket", "K-β: β2 by bucket"]
    assert all("everything" in picture.svg for picture in drawn)


def test_a_trace_without_values_gives_no_picture() -> None:
    assert maps.drawings([maps.TraceData([1], [[NAN]], [[NAN]], ["a"])], looks.looks_of(["kbeta"])["kbeta"]) == []


@pytest.mark.parametrize("usual", [[], ["adam95-warm"], ["kbeta-eigen"], ["adam95-warm", "kbeta-eigen"]])
def test_the_papers_arms_keep_their_looks_and_no_two_arms_look_alike(usual: list[str]) -> None:
    names = ["kbeta", "adam95", "adam999", *usual, *(f"rival{i}" for i in range(8))]
    found = looks.looks_of(names)
    assert found["kbeta"] == looks.looks_of(["x", "kbeta"])["kbeta"]
    assert len(set(found.values())) == len(names)


def test_the_warmed_adam_and_the_eigenbasis_have_the_same_colour_in_every_study() -> None:
    one = looks.looks_of(["kbeta", "lion", "adam95-warm", "muon", "kbeta-eigen"])
    other = looks.looks_of(["kbeta-eigen", "adam95-warm", "sgd"])
    assert [one[arm] for arm in ("adam95-warm", "kbeta-eigen")] == [
        other[arm] for arm in ("adam95-warm", "kbeta-eigen")
    ]
    assert len({look.colour for look in one.values()}) == len(one)


def contrast(one: str, two: str) -> float:
    """The ratio of luminances, as the Web Content Accessibility Guidelines define it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    a, b = sorted((luminance(one), luminance(two)))
    return (b + 0.05) / (a + 0.05)


def test_every_colour_stands_out_from_its_page() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert min(contrast(colour, "#ffffff") for colour in looks.LIGHT) >= 3
    assert min(contrast(colour, "#15191d") for colour in looks.DARK) >= 3


@pytest.mark.parametrize(
    ("data", "suits"),
    [([1, 10], False), ([1, 100], True), ([0, 100], False), ([-1, 5], False), ([], False), ([NAN], False)],
)
def test_a_log_axis_is_chosen_for_positive_values_that_span_decades(data: list[float], suits: bool) -> None:
    assert drawing.log_suits(data) is suits


@given(low=some.floats(-1e12, 1e12), span=some.floats(1e-6, 1e12), log=some.booleans(), most=some.integers(2, 6))
def test_ticks_are_within_the_axis_and_few(low: float, span: float, log: bool, most: int) -> None:
    low = abs(low) + 1e-12 if log else low
    high = low * (1 + span) if log else low + span
    if high <= low * (1 + 1e-9) and low > 0:
        return  # closer together than an axis can tell
    scale = drawing.Scale(low, high, 0.0, 100.0, log)
    ticks = scale.ticks(most)
    assert len(ticks) <= most + 1
    room = 1e-6 * (high - low)
    assert all(low - room <= tick <= high + room for tick in ticks)


def test_nothing_of_pyplot_is_imported() -> None:
    code = "import sys, kourkoutas.lab.showing.report; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def at_ticks(drawn: drawing.Drawing) -> list[float]:
    """The values at the ticks of the axis of y: labels that end left of it."""
    found = re.findall(r'text-anchor="end" class="soft">([^<↑]+)<', str(drawn.svg))
    return [float(text.replace("k", "e3")) for text in found if re.fullmatch(r"[\d.e-]+k?", text)]


def lowest(drawn: drawing.Drawing, look: int) -> float:
    """How far down, in pixels, the line of an optimizer with this colour ends."""
    line = re.search(rf'class="arm c{look}".*?<path d="([^"]+)" class="curve"', str(drawn.svg))
    assert line is not None
    return float(line[1].split()[-1])


def test_an_axis_is_cut_where_an_optimizer_exploded_and_never_below_the_winner() -> None:
    steps = np.arange(1, 101)
    winner = 20 * 10 ** (-7 * steps / 100)
    second = 20 * 10 ** (-5 * steps / 100)
    exploded = 20 * 10 ** (0.28 * steps)
    arms = {
        "kbeta": {0: course(winner.tolist())},
        "adam95": {0: course(second.tolist())},
        "adam999": {0: course(exploded.tolist())},
    }
    for drawn in panels(arms):
        ticks = at_ticks(drawn)
        assert min(ticks) <= 1e-4
        assert max(ticks) <= 1e5
        assert "↑ to 2e29" in drawn.svg
    together = panels(arms)[0]
    assert lowest(together, 0) > lowest(together, 1) + 20 > lowest(together, 2) + 40


def test_one_run_that_diverges_leaves_the_panels_of_the_others_readable() -> None:
    calm = np.linspace(1.0, 0.5, 50)
    diverges = course([10.0**k for k in range(30)], diverged=True)
    arms = {
        "kbeta": {0: course(calm.tolist()), 1: course(calm.tolist())},
        "adam95": {0: course(calm.tolist()), 1: diverges},
    }
    for drawn in panels(arms):
        assert len([tick for tick in at_ticks(drawn) if 0.4 <= tick <= 1.2]) >= 2


def test_a_loss_that_rises_a_little_is_not_cut() -> None:
    arms = {
        "kbeta": {0: course(np.geomspace(1, 1e-3, 50).tolist())},
        "adam95": {0: course(np.geomspace(1, 100, 50).tolist())},
    }
    assert all("↑ to" not in one.svg for one in panels(arms))


def test_labels_of_an_axis_are_not_written_over_each_other() -> None:
    scale = drawing.Scale(0.0, 10.0, 12.0, 344.0)
    drawn = "".join(drawing.x_axis(scale, 20.0, ticks=[0, 1, 4, 9], show=lambda tick: f"{tick:g}0× higher"))
    places = [float(x) for x in re.findall(r'<text x="([\d.]+)"', drawn)]
    assert len(places) == 3  # at 0, 4 and 9: that at 1 would touch the first
    assert len(re.findall(r"<line", drawn)) == 5
