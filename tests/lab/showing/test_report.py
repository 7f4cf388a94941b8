"""The report: what it says, in which order, and that it is self-contained."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import math
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from kourkoutas.lab import testbeds
from kourkoutas.lab.judging import comparing, headline
from kourkoutas.lab.judging import table_file as tables
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.showing import curves, effects, pictures, report
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from tests.lab import made_study
from tests.lab.made_study import analysed, rendered

VOID = ("meta", "link", "img", "br", "image")


class Reader(HTMLParser):
    """Tags with attributes, and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += " " if tag in ("td", "th", "text", "li", "span") else ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.text += data


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    study = made_study.rare_trigger(tmp_path_factory.mktemp("report") / "out")
    return report.write(analysed(study, resamples=199)).read_text(encoding="utf-8")


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", Reader(page).text)


def told(study: Snapshot) -> str:
    return text_of(rendered(study))


def test_the_page_is_well_formed(page: str) -> None:
    assert Reader(page).open == []


def test_the_page_opens_with_the_answer_and_the_cause(page: str) -> None:
    # 1 - 1/1.099 = 9.0 % and a ratio of 4.127 of the paper's table; lion ends at three times kbeta's values
    text = text_of(page)
    lead = (
        "K-β is ahead of Adam 0.95 (9.0 % lower) and Adam 0.999 (4.1× lower) on the deciding endpoint. "
        "No verdict yet on K-β against Lion: runs failed."
    )
    assert lead in text
    cause = text.index("of the logarithm of the ratio (95 % intervals, 10 seeds)")
    assert (
        text.index(lead) < cause < text.index("middle half") < text.index("Learning curves") < text.index("Every seed")
    )


def test_the_effect_plot_says_what_is_lower_or_higher_and_marks_the_endpoint_that_decides(page: str) -> None:
    text = text_of(page)
    assert "(decides)" in text
    assert "held-out BCE (secondary)" in text
    assert "9.0 % lower [−" in text
    assert "← K-β worse" in text
    assert "K-β better →" in text


def test_the_arms_are_ranked_by_their_median_with_their_time_and_losses(page: str) -> None:
    table = re.search(r'<table class="ranked">(.*?)</table>', page, re.S)
    assert table is not None
    names = re.findall(r'<th scope="row">.*?</svg>(.*?)</span>', table[1])
    values = {name_of(arm): list(by_seed.values()) for arm, by_seed in tables.read_table(made_study.TABLE).items()}
    order = sorted(values, key=lambda arm: float(np.median(values[arm])))
    assert [name for name in names if name in values] == order
    row = re.sub(r"\s+", " ", table[1])
    lion = re.search(r">Lion</span></th>.*?</tr>", row)
    assert lion is not None
    assert re.findall(r"<td[^>]*>(\d+)</td>", lion[0])[-2:] == ["1", "2"]  # diverged, failed


def test_every_seeds_value_is_in_the_page(page: str) -> None:
    text = text_of(page)
    for by_seed in tables.read_table(made_study.TABLE).values():
        for value in by_seed.values():
            assert f"{value:.6g}" in text


def test_effect_sizes_stand_before_p_values(page: str) -> None:
    text = text_of(page)
    assert text.index("mean [t]") < text.index("t(9) = 4.288")
    assert "BCa" not in text  # `kbeta stats` has the bootstrap
    assert text.index("rank-biserial r") < text.index("0.00977")
    assert "Holm's adjustment is for 9." in text


def test_the_same_error_stands_once_with_a_count(page: str) -> None:
    text = text_of(page)
    assert "2 failed: RuntimeError: <no memory> & more (Lion, seeds 4, 7)" in text
    assert "2 runs: Lion, seeds 4, 7" in text
    assert text.count("Traceback (most recent call last)") == 1


def test_errors_that_differ_in_an_address_are_the_same(tmp_path: Path) -> None:
    errors = ("object at 0x7f01", "object at 0x7f02", "another")
    ends = {"x": {s: made_study.failed(error) for s, error in enumerate(errors)}, "y": {0: 1.0}}
    text = told(made_study.own(tmp_path / "out", ends))
    assert "2 failed: object at 0x7f01 (x, seeds 0, 1)" in text
    assert "1 failed: another (x, seed 2)" in text


def test_settings_command_machine_and_versions_are_in_the_page(page: str) -> None:
    text = text_of(page)
    for expected in ("--set 'note=<b>'", "beta2_min = 0.88", "30000", "processor", "numpy"):
        assert expected in text


def test_attribution_names_the_cause_that_the_controls_show(page: str) -> None:
    # kbeta-static and adam95-warm end as kbeta does, adam-mid and kbeta-exact about as much higher as adam95
    found = re.search(r"K-β against Adam 0.95: (.*?) of the logarithm", text_of(page))
    assert found is not None
    assert found[1].startswith("hidden warmup ")
    assert 90 < float(found[1].split()[2]) < 130


NAN = math.nan
UNTUNED = "One learning rate for all."
FAILED = made_study.failed()


@pytest.mark.parametrize(
    ("treatment", "baseline", "lead"),
    [
        ([1, 1.1, 1.2, 1.05] * 2, [2, 2.1, 2.1, 2.0] * 2, "new is ahead of old (47 % lower) on the deciding endpoint."),
        ([2, 2.2, 2.1, 2.3] * 2, [1, 1.1, 1.2, 1.05] * 2, "new is behind old (98 % higher) on the deciding endpoint."),
        ([2, 2.6, 2.4, 2.5] * 2, [1, 1.1, 1.2, 1.05] * 2, "new is behind old (2.2× higher) on the deciding endpoint."),
        ([1, 2, 3, 4] * 2, [2, 1, 4, 3] * 2, "No clear difference between new and old."),
        ([1, 2, 3], [1, 2, 3], "new ends exactly like old."),
        ([1], [2], "new cannot be compared with old: one seed is too few."),
        ([1, 2], [2, 2.5], "new cannot be compared with old: 2 pairs are too few for 1 comparison, 6 are needed."),
        ([*[1] * 7, NAN], [2] * 8, "No clear difference between new and old (runs diverged)."),
        ([NAN] * 2, [NAN] * 2, "new cannot be compared with old: no run gave a value."),
    ],
)
def test_the_headline_says_what_the_data_support(
    tmp_path: Path, treatment: Sequence[float], baseline: Sequence[float], lead: str
) -> None:
    study = made_study.own(tmp_path / "out", {"new": dict(enumerate(treatment)), "old": dict(enumerate(baseline))})
    judged = analysed(study).primary.contrasts[0].verdict != "untested"
    assert analysed(study).headline == (f"{lead} {UNTUNED}" if judged else lead)
    assert lead.replace(" %", "\u00a0%") in Reader(rendered(study)).text


def test_the_headline_of_a_higher_is_better_endpoint_calls_more_better(tmp_path: Path) -> None:
    new, old = [0.9, 0.91, 0.92] * 2, [0.5, 0.52, 0.51] * 2
    ends = {"new": dict(enumerate(new)), "old": dict(enumerate(old))}
    found = analysed(made_study.own(tmp_path / "out", ends, higher_is_better=True))
    assert (
        found.headline == f"new is ahead of old (78 % higher) on the deciding endpoint. {UNTUNED}"
    )  # means of 0.91 and 0.51


def test_several_that_are_unclear_are_no_clear_winner(tmp_path: Path) -> None:
    ends = {"new": [1.0, 2.0, 3.0, 4.0], "a": [0.9, 2.1, 2.9, 4.2], "b": [1.4, 2.2, 2.8, 4.1]}
    study = made_study.own(tmp_path / "out", {arm: dict(enumerate(x * 2)) for arm, x in ends.items()})
    assert analysed(study).headline == f"No clear winner on the deciding endpoint. {UNTUNED}"


def test_a_study_of_which_every_run_failed_says_so(tmp_path: Path) -> None:
    ends = {"new": {0: FAILED, 1: FAILED}, "old": {0: FAILED, 1: FAILED}}
    found = analysed(made_study.own(tmp_path / "out", ends))
    assert found.headline == "All 4 runs failed: there is nothing to compare."


def test_a_result_that_holm_takes_back_is_not_shown(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(1, 0.1, 9)
    shift = np.array(
        [0.5, 0.9, 0.1, 1.2, -0.3, 0.8, 0.4, 0.2, -0.2]
    )  # paired t: p = 0.02 alone, above 0.05 among eight
    values = {"kbeta": base, "first": base + shift, **{f"n{i}": base + rng.normal(0, 1, 9) for i in range(7)}}
    study = made_study.own(tmp_path / "out", {arm: dict(enumerate(map(float, x))) for arm, x in values.items()})
    found = analysed(study)
    first = found.primary.contrasts[0]
    assert first.p is not None
    assert first.p < 0.05
    assert found.headline == f"No clear winner on the deciding endpoint. {UNTUNED}"
    assert "after Holm for 8 comparisons" in told(study)


def test_a_grid_is_answered_in_numbers() -> None:
    arms = [f"{name}[lr={lr}]" for name in ("kbeta", "adam95") for lr in (0.1, 0.2, 0.3)]
    values = {arm: {s: 1.0 + k + 0.01 * s * k for s in range(7)} for k, arm in enumerate(arms)}
    pairs = [(arm, arm.replace("kbeta", "adam95")) for arm in arms[:3]]
    found = headline.headline([comparing.compare_pairs(values, pairs, resamples=0)])
    assert found == "Of 3 comparisons, in 3 the first named is ahead."


def test_a_study_without_finished_runs_still_has_a_page(tmp_path: Path) -> None:
    text = told(made_study.own(tmp_path / "out", {"kbeta": {0: None}, "adam95": {0: made_study.failed(None)}}))
    assert "1 of 2 runs have ended. The verdict comes when all have." in text
    assert "No run has logged a loss" in text
    assert "no error was recorded" in text


def test_an_interim_page_gives_no_verdict(tmp_path: Path) -> None:
    ends = {"x": {0: 1.0, 1: 1.1, 2: None}, "y": {0: 2.0, 1: 2.2, 2: 2.1}}
    page = rendered(made_study.own(tmp_path / "out", ends))
    assert "5 of 6 runs have ended. The verdict comes when all have." in text_of(page)
    assert "Effect plot" not in page
    assert "Each comparison" not in page


def test_values_without_a_logarithm_are_compared_as_differences(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 0.0, 1: 1.0}, "y": {0: 1.5, 1: 2.5}}, log=True)
    text = told(study)
    assert "values at or below 0 have no logarithm" in text
    assert "Differences above 0 speak for the first named" in text


def test_values_of_both_signs_are_drawn_in_their_own_unit(tmp_path: Path) -> None:
    ends = {"x": {0: -1.0, 1: 0.5, 2: -0.7}, "y": {0: -0.5, 1: 1.5, 2: 0.1}}
    plot = effects.plot([analysed(made_study.own(tmp_path / "out", ends)).primary])
    assert plot is not None
    assert "Effect plot, difference" in plot.description
    assert "%" not in plot.description.replace("95 %", "")


def test_arms_without_a_common_seed_are_noted(tmp_path: Path) -> None:
    given = {"x": {0: 1.0}, "y": {1: 1.0}}
    found = comparing.compare_pairs(given, [("x", "y")], resamples=0)
    assert found.notes == ("no finished seed in common, so not compared: x vs y",)
    assert headline.headline([found]) == headline.NOTHING


EVIL = "\"'></text></svg></title></script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"


def test_names_from_outside_cannot_inject_markup(tmp_path: Path) -> None:
    ends = {EVIL: {0: 1.0, 1: 1.1, 2: made_study.failed(EVIL)}, "y": {0: 2.0, 1: 2.1, 2: 2.2}}
    page = rendered(made_study.own(tmp_path / "out", ends, title=EVIL))
    seen = Reader(page)
    assert [tag for tag, _ in seen.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in seen.tags}
    assert not any(name.startswith("on") for _, attributes in seen.tags for name in attributes)
    assert EVIL in seen.text


def test_writing_writes_the_file_and_nothing_else(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 2.0}})
    before = set(study.path.rglob("*"))
    out = report.write(analysed(study))
    assert out == tmp_path / "out" / "report.html"
    assert set(study.path.rglob("*")) - before == {out}
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_the_page_is_one_file_below_three_megabytes_that_refers_to_nothing_outside_itself(page: str) -> None:
    assert len(page.encode()) < 3e6
    tags = Reader(page).tags
    links = [
        str(a[key]) for _, a in tags for key in ("src", "href", "data", "action", "srcset", "poster") if a.get(key)
    ]
    assert links
    assert all(link.startswith(("data:", "#")) for link in links)
    ids = {a["id"] for _, a in tags if a.get("id")}
    assert {link[1:] for link in links if link.startswith("#")} <= ids
    assert not re.search(r"url\(|@import|<script [^>]*src", page)


def test_the_content_policy_allows_this_script_and_this_style_and_nothing_else(page: str) -> None:
    policy = next(str(a["content"]) for tag, a in Reader(page).tags if a.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    for tag in ("script", "style"):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert not any("style" in attributes for _, attributes in Reader(page).tags)


def test_every_picture_is_a_whole_svg_with_a_description_and_text_of_eleven_pixels_or_more(page: str) -> None:
    drawn = re.findall(r'<svg [^>]*role="(?:img|group)".*?</svg>', page, re.S)
    assert len(drawn) > 20
    for text in drawn:
        root = ElementTree.fromstring(text)
        assert root.get("aria-label")
        width = float(root.get("viewBox", "").split()[2])
        # the page shows a picture at its own size or larger from a phone on: 390 px less 32 px of margins
        assert width <= 358
        assert not [one for one in root.iter() if one.get("font-size")]
    assert "svg text { font-size: 12px;" in page


def test_a_picture_never_reaches_over_its_own_edge(page: str) -> None:
    for text in re.findall(r'<svg [^>]*role="(?:img|group)".*?</svg>', page, re.S):
        root = ElementTree.fromstring(text)
        _, _, width, height = map(float, root.get("viewBox", "").split())
        for one in root.iter():
            for name, most in (("x", width), ("x1", width), ("cx", width), ("y", height), ("y2", height)):
                if one.get(name):
                    assert -1 <= float(str(one.get(name))) <= most + 1


def test_the_download_holds_every_run(page: str) -> None:
    (link,) = [str(a["href"]) for tag, a in Reader(page).tags if tag == "a" and a.get("download") == "runs.csv"]
    runs = list(csv.DictReader(io.StringIO(base64.b64decode(link.partition(",")[2]).decode())))
    assert len(runs) == 90
    assert {row["status"] for row in runs} == {"ok", "diverged", "failed"}
    (first,) = [row for row in runs if (row["optimizer"], row["seed"]) == ("kbeta", "0")]
    assert float(first["endpoint"]) == 0.001055  # the paper's


def test_the_last_single_batch_loss_is_no_part_of_a_curve(tmp_path: Path) -> None:
    study = made_study.rare_trigger(tmp_path / "out", arms=["kbeta"], seeds=1)
    (course,) = curves.courses(Snapshot.read(study.path))["kbeta"].values()
    assert course.steps[-1] == 29_500  # the last block; 30,000 is the last batch's own


def test_what_a_users_function_logs_is_drawn_to_its_end(tmp_path: Path) -> None:
    curve = {"step": [1.0, 2.0, 3.0], "loss": [3.0, 2.0, 1.0]}
    ends: made_study.Ends = {"x": {0: RunResult(status="ok", endpoint=1.0, curve=curve)}, "y": {0: 2.0}}
    study = made_study.own(tmp_path / "out", ends)
    (course,) = curves.courses(Snapshot.read(study.path))["x"].values()
    assert (course.steps[-1], course.losses[-1]) == (3.0, 1.0)
    assert 'data-plot="' in rendered(study)


def test_the_map_shows_which_bucket_spikes(page: str) -> None:
    text = text_of(page)
    assert "K-β: sun by bucket" in text
    assert "sun of each bucket against step, K-β: the largest of each stretch, mean of 10 runs" in page
    assert "a.very.l…t.weight" in text


def test_the_page_names_the_command_that_would_settle_what_is_open(tmp_path: Path) -> None:
    study = made_study.rare_trigger(tmp_path / "out", ("kbeta", "adam95"))
    assert study.record.tuning is None
    step = analysed(study).next_step
    assert step.startswith("Next, for a fair answer: kbeta study rare_trigger --seeds 0-9")
    assert "--tune lr=1e-3:1e-1" in step  # ten times less to ten times more than 1e-2
    assert step.endswith("out-tuned")
    assert "--tune lr=1e-3:1e-1" in text_of(rendered(study)).replace("\u2060", "")


def test_the_sentence_for_a_paper_has_the_size_the_interval_and_the_test(tmp_path: Path) -> None:
    study = made_study.rare_trigger(tmp_path / "out", ("kbeta", "adam95"))
    found = analysed(study)
    (c,) = found.primary.contrasts
    assert c.p is not None
    assert found.for_a_paper.startswith("On rare_trigger (paper, jax), seeds 0-9: K-β is better than Adam 0.95 (")
    assert "9.0 % lower [−" in found.for_a_paper
    assert f"p = {c.p:.3g}" in found.for_a_paper


def test_a_study_without_a_verdict_has_no_sentence_for_a_paper(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"new": {0: 1.0}, "old": {0: 2.0}})
    assert analysed(study).for_a_paper == ""


def test_the_profile_and_the_maps_are_folded(page: str) -> None:
    assert '<details id="traces">' in page
    assert '<details id="profiles">' in page
    assert '<details id="curves" open>' in page


SETTINGS = {"samples": 20, "frames": 14}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A study of two arms and two seeds, of which adam95 finished the second only."""
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))
    setup = {"testbed": "heat2d", "preset": "smoke", "engine": "torch", "settings": SETTINGS}
    arms = [store.Arm(label=name, optimizer=name) for name in ("kbeta", "adam95")]
    testbed = testbeds.get("heat2d")
    settings = testbeds.settings_of(testbed, "smoke", SETTINGS)
    with store.writing(tmp_path / "out", **setup, arms=arms, seeds=range(2), command="kbeta study heat2d") as writer:
        for arm, seed in (("kbeta", 0), ("kbeta", 1), ("adam95", 1)):
            spec = RunSpec(**setup, optimizer=arm, seed=seed)
            writer.plan([spec])
            run = writer.folder(spec)
            np.savez(run / "params.npz", **testbed.problem(settings, seed).params)
            curve = {"step": [35.0, 70.0], "loss": [1.0, 0.5], "lr": [1e-3, 1e-4]}
            metrics = {"train_mse": 0.1, "validation_mse": 0.1, "test_mse": 0.1, "rollout_mse": 0.1}
            store.write_result(run, RunResult(status="ok", endpoint=0.1, metrics=metrics, curve=curve))
    return tmp_path / "out"


def test_a_report_shows_the_testbeds_pictures_of_the_seed_that_most_arms_finished(folder):
    study = Snapshot.read(folder)
    (first, words), (_, more) = pictures.own(Snapshot.read(study.path))
    assert words == "Frame 6 of a test case, truth first: raw, contrast-equalised, and error (seed 1)"
    assert more.endswith("(seed 1)")
    titles = [axes.get_title().partition("\n")[0] for axes in first.axes if axes.get_title()]
    assert titles == ["truth", "K-β", "Adam 0.95"]
    page = rendered(Snapshot.read(folder))
    assert "What was learnt" in page
    assert words in page


def test_the_pictures_follow_a_dark_page_and_keep_their_text(folder):
    page = rendered(Snapshot.read(folder))
    (first, _) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)"', page)
    picture = base64.b64decode(first).decode()
    assert "prefers-color-scheme:dark" in picture
    assert "#000000" not in picture
    assert ">truth</text>" in picture


def test_a_testbed_without_pictures_gets_no_section_for_them(tmp_path):
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 2.0}})
    assert "What was learnt" not in rendered(study)
