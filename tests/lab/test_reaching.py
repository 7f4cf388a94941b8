"""Time to a target on the page: the share of runs that reached it over time, who was first, and runs that never did."""

from __future__ import annotations

import html
import re
import subprocess
import sys

import pytest

from kourkoutas.lab.results.snapshot import Snapshot
from tests.lab import made_study
from tests.lab.made_study import rendered

# The step at which the loss falls to 1, of 100; None: never. quick is first on 3 seeds, equal on 1.
ARRIVALS = {"quick": {0: 20, 1: 20, 2: 40, 3: None}, "slow<b>": {0: 40, 1: 60, 2: None, 3: None}}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    steps = [20.0 * k for k in range(1, 6)]
    ends = {
        arm: {
            seed: made_study.finished(
                1.0 + seed,
                curve={"step": steps, "loss": [1.0 if at is not None and step >= at else 3.0 for step in steps]},
                times={"per_step": 0.5},
            )
            for seed, at in by_seed.items()
        }
        for arm, by_seed in ARRIVALS.items()
    }
    return made_study.own(tmp_path_factory.mktemp("target") / "out", ends)


def section_of(page: str) -> str:
    found = re.search(r'<details id="target".*?</details>', page, re.DOTALL)
    assert found is not None
    return found[0]


def test_the_section_is_folded_and_listed_and_tells_who_was_first_how_often(study: Snapshot) -> None:
    page = rendered(study, target="loss<=1")
    section = section_of(page)
    assert section.startswith('<details id="target">')  # not open
    assert 'href="#target"' in page
    text = html.unescape(re.sub(r"<[^>]+>", " ", section))
    assert "Time to loss<=1" in text
    # Three pairs of one sign out of 2³ equally likely ones, two-sided.
    assert "quick got there before slow<b> on 3 of 4 seeds (equal on 1; Wilcoxon p = 0.25 after Holm)." in text
    assert "<b>" not in section


def test_a_median_that_was_never_reached_is_called_so_and_not_diverged(study: Snapshot) -> None:
    section = section_of(rendered(study, target="loss<=1"))
    rows = re.findall(r'<tr><th scope="row">(.*?)</th><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>', section)
    # the median of 20, 20, 40 and never is 30; that of 40, 60, never and never lies between 60 and never
    assert rows == [
        ("quick", "3 of 4", "30", "15"),
        ("slow&lt;b&gt;", "2 of 4", "not reached", "not reached"),
    ]


def test_the_line_of_an_arm_rises_where_a_run_arrives_and_stays_below_the_top_where_one_never_does(
    study: Snapshot,
) -> None:
    section = section_of(rendered(study, target="loss<=1"))
    lines = re.findall(r'<path d="(M[^"]+)" class="curve"', section)
    assert len(lines) == 2
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", lines[0])]
    found = re.findall(r'y="([\d.]+)" text-anchor="end" class="soft">(\d+)<', section)
    axis = {text: float(y) - 4 for y, text in reversed(found)}  # the y axis comes first, and the x axis has a 100 too
    high, low = axis["100"], axis["0"]
    shares = [round((low - y) / (low - high), 2) for _, y in points]
    assert shares == [0, 0, 0.5, 0.5, 0.75, 0.75]
    left, right = points[0][0], points[-1][0]
    assert [round(100 * (x - left) / (right - left)) for x, _ in points] == [0, 20, 20, 40, 40, 100]


def test_without_a_target_there_is_no_section(study: Snapshot) -> None:
    assert 'id="target"' not in rendered(study)


def kbeta(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kourkoutas", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_report_takes_a_target_and_refuses_one_that_no_run_logged_leaving_the_page_as_it_was(study: Snapshot) -> None:
    done = kbeta("report", str(study.path), "--target", "loss<=1")
    assert done.returncode == 0, done.stderr
    page = (study.path / "report.html").read_text(encoding="utf-8")
    assert "Time to loss&lt;=1" in page
    done = kbeta("report", str(study.path), "--target", "acc>=1")
    assert done.returncode == 2
    assert "no run logged 'acc'; logged: loss" in " ".join(done.stderr.split())
    assert (study.path / "report.html").read_text(encoding="utf-8") == page
