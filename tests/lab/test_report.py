"""The report: what it says, in which order, and that it is self-contained."""

from __future__ import annotations

import base64
import csv
import dataclasses
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

from kourkoutas.lab.judging import tables
from kourkoutas.lab.judging.analysis import analyse
from kourkoutas.lab.showing import answer, report
from kourkoutas.lab.specs.spec import RunResult
from tests.lab import made_study

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
    return report.build(study).read_text(encoding="utf-8")


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", Reader(page).text)


def told(study: report.Study) -> str:
    return text_of(report.render(report.page_of(study, resamples=99)))


def test_the_page_is_well_formed(page: str) -> None:
    assert Reader(page).open == []


def test_the_page_opens_with_one_sentence_that_answers(page: str) -> None:
    # 1 - 1/1.099 = 9.0 % and 1 - 1/4.127 = 76 % of the paper's table; lion's mean says nothing, since a run diverged
    lead = "kbeta is better than adam95 (9.0 %), adam999 (76 %) and lion (1 of 7 diverged) here."
    text = text_of(page)
    assert lead in text
    assert text.index(lead) < text.index("middle half") < text.index("Learning curves") < text.index("Every seed")


def test_the_effect_plot_tells_percent_and_sides_in_words_and_marks_the_endpoint_that_decides(page: str) -> None:
    text = text_of(page)
    assert "(primary: it decides)" in text
    assert "held-out BCE (secondary)" in text
    # the paper's ratio 1.099 [1.045, 1.155] is 9.0 % [4.3, 13]
    assert "9.0 % better (4.3 to 13)" in text
    assert "← kbeta worse" in text
    assert "kbeta better →" in text


def test_the_arms_are_ranked_by_their_median_with_their_time_and_losses(page: str) -> None:
    table = re.search(r'<table class="ranked">(.*?)</table>', page, re.S)
    assert table is not None
    names = re.findall(r'<span class="pick">(.*?)</span>', table[1])
    values = {arm: list(by_seed.values()) for arm, by_seed in tables.read_table(made_study.TABLE).items()}
    order = sorted(values, key=lambda arm: float(np.median(values[arm])))
    assert [name for name in names if name in values] == order
    row = re.sub(r"\s+", " ", table[1])
    lion = re.search(r">lion</span>.*?</tr>", row)
    assert lion is not None
    assert re.findall(r"<td[^>]*>(\d+)</td>", lion[0])[-3:] == ["1", "2", "1"]  # diverged, failed, to come


def test_every_seeds_value_and_pair_are_in_the_page(page: str) -> None:
    text = text_of(page)
    for by_seed in tables.read_table(made_study.TABLE).values():
        for value in by_seed.values():
            assert f"{value:.6g}" in text
    assert "1.199" in text  # the paper's ratio for seed 0


def test_effect_sizes_stand_before_p_values(page: str) -> None:
    text = text_of(page)
    assert text.index("Effect sizes") < text.index("t(9) = 4.288")
    assert text.index("BCa bootstrap") < text.index("0.00977")


def test_the_same_error_stands_once_with_a_count(page: str) -> None:
    text = text_of(page)
    assert "2 failed: RuntimeError: <no memory> & more (lion, seeds 4, 7)" in text
    assert "2 runs: lion, seeds 4, 7" in text
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


def test_the_command_for_ten_more_seeds_extends_the_studys_own(page: str) -> None:
    assert (
        "Ten more seeds: kbeta study rare_trigger --seeds 0-19 --optimizers kbeta,adam95 --set 'note=<b>'"
        in text_of(page)
    )


def test_attribution_names_the_cause_that_the_controls_show(page: str) -> None:
    # kbeta-static and adam95-warm end as kbeta does, adam-mid and kbeta-exact about as much higher as adam95
    found = re.search(r"kbeta ends better than adam95 \(1\.099 \[1\.045, 1\.155\]\)\. (.*?) kbeta ends", text_of(page))
    assert found is not None
    assert "The data support as a cause: the hidden warmup (in 3 of 3 contrasts)." in found[1]
    assert "Not supported as a cause: the dynamics of β2, the mean value of β2." in found[1]
    assert "Against adam95 with the same warmup the data support no remaining difference" in found[1]


NAN = math.nan
FAILED = made_study.failed()


@pytest.mark.parametrize(
    ("treatment", "baseline", "lead"),
    [
        ([1, 1.1, 1.2, 1.05], [2, 2.2, 2.1, 2.3], "new is better than old (49 %) here."),
        ([2, 2.2, 2.1, 2.3], [1, 1.1, 1.2, 1.05], "new is worse than old (98 %) here."),
        ([1, 2, 3, 4], [2, 1, 4, 3], "new is not shown to differ from old here."),
        ([1, 2, 3.1, 4], [2, 1, 4, 3], "new is not shown to differ from old; if anything, slightly worse here."),
        ([1, 2, 3], [1, 2, 3], "new ends exactly as old does here."),
        ([1], [2], "new cannot be compared with old: one seed is too few here."),
        ([1, 1, 1, NAN], [2, 2, 2, 2], "new is not shown to differ from old (1 of 4 of new diverged) here."),
        ([NAN] * 2, [NAN] * 2, "new cannot be compared with old: every run diverged here."),
    ],
)
def test_the_sentence_says_what_the_data_support(
    tmp_path: Path, treatment: Sequence[float], baseline: Sequence[float], lead: str
) -> None:
    ends = {"new": dict(enumerate(treatment)), "old": dict(enumerate(baseline))}
    study = made_study.own(tmp_path / "out", ends)
    assert answer.sentence(analyse(study, resamples=99).primary.findings) == lead
    assert lead.replace(" %", "\u00a0%") in Reader(report.render(report.page_of(study, resamples=99))).text


def test_the_sentence_of_a_higher_is_better_endpoint_calls_more_better(tmp_path: Path) -> None:
    ends = {"new": {0: 0.9, 1: 0.91, 2: 0.92}, "old": {0: 0.5, 1: 0.52, 2: 0.51}}
    page = report.page_of(made_study.own(tmp_path / "out", ends, higher_is_better=True), resamples=99)
    # means of 0.91 and 0.51
    assert page.lead == "new is better than old (78 %) here."


def test_several_that_are_not_shown_to_differ_share_the_side_they_are_on(tmp_path: Path) -> None:
    base = [1.0, 2.0, 3.0, 4.0]
    near = {"a": [0.9, 2.3, 3.1, 4.3], "b": [1.4, 2.2, 2.8, 4.1], "c": [1.1, 1.9, 2.5, 4.0]}
    ends = {"new": base, "a": near["a"], "b": near["b"]}
    study = made_study.own(tmp_path / "out", {arm: dict(enumerate(x)) for arm, x in ends.items()})
    assert (
        report.page_of(study, resamples=99).lead == "new is not shown to differ from a and b; if anything, better here."
    )
    study = made_study.own(tmp_path / "both", {arm: dict(enumerate(x)) for arm, x in (ends | {"c": near["c"]}).items()})
    assert report.page_of(study, resamples=99).lead == "new is not shown to differ from a, b and c here."


def test_an_arm_of_which_no_run_finished_is_named_in_the_sentence(tmp_path: Path) -> None:
    ends = {"new": {0: 1.0, 1: 1.1, 2: 1.05}, "old": {0: 2.0, 1: 2.2, 2: 2.1}, "lost": dict.fromkeys(range(3), FAILED)}
    page = report.page_of(made_study.own(tmp_path / "out", ends), resamples=99)
    assert page.lead == "new is better than old (50 %) here; lost has no finished seed to compare."


def test_a_study_of_which_every_run_failed_says_so(tmp_path: Path) -> None:
    ends = {"new": {0: FAILED, 1: FAILED}, "old": {0: FAILED, 1: FAILED}}
    page = report.page_of(made_study.own(tmp_path / "out", ends), resamples=99)
    assert page.lead == "All 4 runs failed: there is nothing to compare."


def test_a_result_that_holm_takes_back_is_not_shown(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(1, 0.1, 8)
    shift = np.array([0.5, 0.9, 0.1, 1.2, -0.3, 0.8, 0.4, 0.2])  # paired t: p = 0.02 alone, above 0.05 among eight
    values = {"kbeta": base, "first": base + shift, **{f"n{i}": base + rng.normal(0, 1, 8) for i in range(7)}}
    study = made_study.own(tmp_path / "out", {arm: dict(enumerate(map(float, x))) for arm, x in values.items()})
    page = report.page_of(study, resamples=99)
    finding = page.analysis.primary.findings[0]
    assert finding.p is not None
    assert finding.p < 0.05
    assert "is not shown to differ from first" in page.lead
    assert "after Holm for 8 contrasts" in text_of(report.render(page))


def test_a_grid_is_answered_in_numbers(tmp_path: Path) -> None:
    ends = {f"a{k}": {s: 1.0 + k + 0.01 * s * k for s in range(4)} for k in range(8)}
    findings = analyse(made_study.own(tmp_path / "out", ends), resamples=99).primary.findings
    spread = [dataclasses.replace(f, treatment=f"t{k}") for k, f in enumerate(findings)]
    assert answer.sentence(spread) == "Of 7 comparisons, in 7 the first named is better."


def test_a_study_without_finished_runs_still_has_a_page(tmp_path: Path) -> None:
    text = told(made_study.own(tmp_path / "out", {"kbeta": {0: None}, "adam95": {0: made_study.failed(None)}}))
    assert "So far, with 1 of 2 runs done, no two optimizers have a finished seed in common." in text
    assert "No run has logged a loss" in text
    assert "no error was recorded" in text


def test_an_unfinished_study_says_so_beside_its_answer(tmp_path: Path) -> None:
    ends = {"x": {0: 1.0, 1: 1.1, 2: None}, "y": {0: 2.0, 1: 2.2, 2: 2.1}}
    assert "So far, with 5 of 6 runs done: x " in told(made_study.own(tmp_path / "out", ends))


def test_values_without_a_logarithm_are_compared_as_differences(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 0.0, 1: 1.0}, "y": {0: 1.5, 1: 2.5}}, log=True)
    text = told(study)
    assert "values at or below 0 have no logarithm" in text
    assert "mean difference [95 %]" in text


def test_values_of_both_signs_are_drawn_in_their_own_unit(tmp_path: Path) -> None:
    ends = {"x": {0: -1.0, 1: 0.5, 2: -0.7}, "y": {0: -0.5, 1: 1.5, 2: 0.1}}
    page = report.page_of(made_study.own(tmp_path / "out", ends), resamples=99)
    assert "Effect plot, difference" in page.effects[0].description
    assert "%" not in page.effects[0].description.replace("95 %", "")


def test_arms_without_a_common_seed_are_noted(tmp_path: Path) -> None:
    text = told(made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {1: 1.0}}))
    assert "no finished seed in common, so not compared: x vs y" in text


EVIL = "\"'></text></svg></title></script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;"


def test_names_from_outside_cannot_inject_markup(tmp_path: Path) -> None:
    ends = {EVIL: {0: 1.0, 1: 1.1, 2: made_study.failed(EVIL)}, "y": {0: 2.0, 1: 2.1, 2: 2.2}}
    page = report.build(made_study.own(tmp_path / "out", ends, title=EVIL)).read_text(encoding="utf-8")
    seen = Reader(page)
    assert [tag for tag, _ in seen.tags].count("script") == 1
    assert "img" not in {tag for tag, _ in seen.tags}
    assert not any(name.startswith("on") for _, attributes in seen.tags for name in attributes)
    assert EVIL in seen.text


def test_build_writes_the_file_and_nothing_else(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 2.0}})
    out = report.build(study, tmp_path / "new" / "report.html")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["report.html"]
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert report.build(study) == tmp_path / "out" / "report.html"


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
        assert width <= 358 or "wide-only" in root.get("class", "")
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


def test_the_downloads_hold_every_run_and_the_drawn_curves(page: str) -> None:
    links = {a["download"]: str(a["href"]) for tag, a in Reader(page).tags if tag == "a" and a.get("download")}
    tables_ = {
        name: list(csv.DictReader(io.StringIO(base64.b64decode(link.partition(",")[2]).decode())))
        for name, link in links.items()
    }
    runs = tables_["runs.csv"]
    assert len(runs) == 90
    assert {row["status"] for row in runs} == {"ok", "diverged", "failed", "unfinished"}
    (first,) = [row for row in runs if (row["optimizer"], row["seed"]) == ("kbeta", "0")]
    assert float(first["endpoint"]) == 0.001055  # the paper's
    assert {row["optimizer"] for row in tables_["curves.csv"]} >= {"kbeta", "adam95"}


def test_the_last_single_batch_loss_is_no_part_of_a_curve(page: str) -> None:
    link = re.search(r'href="data:text/csv[^"]*base64,([^"]*)" download="curves.csv"', page)
    assert link is not None
    rows = [
        row for row in csv.DictReader(io.StringIO(base64.b64decode(link[1]).decode())) if row["optimizer"] == "kbeta"
    ]
    assert float(rows[-1]["step"]) == 29_500  # the last block; 30,000 is the last batch's own


def test_what_a_users_function_logs_is_drawn_to_its_end(tmp_path: Path) -> None:
    curve = {"step": [1.0, 2.0, 3.0], "loss": [3.0, 2.0, 1.0]}
    ends: made_study.Ends = {"x": {0: RunResult(status="ok", endpoint=1.0, curve=curve)}, "y": {0: 2.0}}
    page = report.render(report.page_of(made_study.own(tmp_path / "out", ends), resamples=99))
    link = re.search(r'base64,([^"]*)" download="curves.csv"', page)
    assert link is not None
    assert "x,3.0,1.0" in base64.b64decode(link[1]).decode()


def test_the_map_shows_which_bucket_spikes(page: str) -> None:
    text = text_of(page)
    assert "kbeta: sun by bucket" in text
    assert "sun of each bucket against step, kbeta: the largest of each stretch, mean of 10 runs" in page
    assert "a.very.l…t.weight" in text
