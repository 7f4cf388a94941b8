"""The report in a real browser: what it shows where, what a reader can do, and that it asks nobody for anything."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kourkoutas.lab.showing import report
from tests.lab import made_study
from tests.lab.showing.browsing import AXE, MISSING, Tab, chromium
from tests.lab.showing.test_report import EVIL

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))

WIDTHS = ((1400, 900), (390, 844))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    return report.write(
        made_study.analysed(made_study.rare_trigger(tmp_path_factory.mktemp("report") / "out"))
    ).as_uri()


def box(tab: Tab, selector: str) -> dict[str, float]:
    found: dict[str, float] = tab.page.locator(selector).first.bounding_box()
    return found


def test_the_page_loads_without_a_complaint_and_asks_for_nothing(browser: Any, address: str) -> None:
    with Tab(browser, address) as tab:
        assert tab.complaints == []
        assert [url for url in tab.requests if not url.startswith("data:")] == [address]
        # the control: a page of the same policy is stopped, and that is noticed here
        tab.page.evaluate("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))")
        tab.page.wait_for_timeout(200)
        assert any("Content Security Policy" in text for text in tab.complaints)


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_answer_and_effect_plot_are_above_the_fold(browser: Any, address: str, width: int, height: int) -> None:
    with Tab(browser, address, width, height) as tab:
        for selector in (".lead", ".effects svg"):
            place = box(tab, selector)
            assert place["y"] >= 0
            assert place["y"] + place["height"] <= height


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_nothing_is_cut_and_no_text_is_below_eleven_pixels(browser: Any, address: str, width: int, height: int) -> None:
    with Tab(browser, address, width, height) as tab:
        tab.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        seen = tab.page.evaluate(
            """() => {
              const root = document.documentElement, small = [], out = [];
              for (const text of document.querySelectorAll("svg text")) {
                const shown = text.getBoundingClientRect(), svg = text.closest("svg");
                if (!shown.width) continue;
                const scale = svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;
                if (scale * parseFloat(getComputedStyle(text).fontSize) < 11) small.push(text.textContent);
                const around = svg.getBoundingClientRect();
                if (shown.left < around.left - 2 || shown.right > around.right + 2) out.push(text.textContent);
              }
              const tables = [...document.querySelectorAll("table")].filter(table =>
                table.getBoundingClientRect().right > innerWidth && !table.closest(".scroll"));
              return {over: root.scrollWidth - root.clientWidth, small, out, tables: tables.length};
            }"""
        )
        assert seen == {"over": 0, "small": [], "out": [], "tables": 0}


def overlapping(tab: Tab) -> list[list[str]]:
    found: list[list[str]] = tab.page.evaluate(
        """() => {
          const found = [];
          for (const svg of document.querySelectorAll("main svg[role]")) {
            const texts = [...svg.querySelectorAll("text")].map(one => [one, one.getBoundingClientRect()]);
            texts.forEach(([one, a], k) => texts.slice(k + 1).forEach(([two, b]) => {
              const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
              const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
              if (wide > 2 && high > 4) found.push([one.textContent, two.textContent]);
            }));
          }
          return found;
        }"""
    )
    return found


@pytest.mark.parametrize(("width", "height"), WIDTHS)
def test_no_two_texts_of_a_picture_overlap(browser: Any, address: str, width: int, height: int) -> None:
    with Tab(browser, address, width, height) as tab:
        tab.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert overlapping(tab) == []


def test_light_and_dark_differ_in_page_and_pictures(browser: Any, address: str) -> None:
    found = {}
    for scheme in ("light", "dark"):
        with Tab(browser, address, color_scheme=scheme) as tab:
            found[scheme] = tab.page.evaluate(
                """() => ["body", ".effects svg text", ".panel .curve", ".panel .grid"].map(one => {
                  const style = getComputedStyle(document.querySelector(one));
                  return one === "body" ? style.backgroundColor : one.includes("text") ? style.fill : style.stroke;
                })"""
            )
    assert all(a != b for a, b in zip(found["light"], found["dark"], strict=True))


def test_hovering_shows_values(browser: Any, address: str) -> None:
    with Tab(browser, address) as tab:
        tip = tab.page.locator("#tip")
        assert tip.is_hidden()
        tab.page.locator(".effects svg .effect").first.hover()
        # log10 of the ratio is 0.04087 ± t(9; 1 - 0.05/18)·0.009531: three contrasts on three endpoints are one family
        assert tip.text_content() == "K-β vs Adam 0.95: 9.0 % lower [−16, −1.5]"
        dot = tab.page.locator("#ends .panel >> nth=0 >> g.arm >> nth=0 >> a .point").last  # above all others
        dot.scroll_into_view_if_needed()
        dot.hover()
        assert tip.text_content() == "K-β, seed 9: 0.002445"
        plot = tab.page.locator("svg[data-plot]").first
        plot.scroll_into_view_if_needed()
        place = plot.bounding_box()
        tab.page.mouse.move(place["x"] + 0.6 * place["width"], place["y"] + 0.3 * place["height"])
        text = tip.text_content()
        assert text.startswith("step ")
        assert "K-β: 0." in text
        tab.page.mouse.move(2, 2)
        assert tip.is_hidden()


def test_the_keyboard_reaches_the_effects_and_the_folded_parts(browser: Any, address: str) -> None:
    with Tab(browser, address) as tab:
        tab.page.locator(".effects svg .effect").first.focus()
        assert "9.0 % lower" in tab.page.locator("#tip").text_content()
        tab.page.locator("#settings summary").focus()
        tab.page.keyboard.press("Enter")
        assert tab.page.locator("#settings pre").first.is_visible()


def test_a_seed_leads_to_its_run(browser: Any, address: str) -> None:
    with Tab(browser, address) as tab:
        assert not tab.page.locator("#runs table").is_visible()
        dot = tab.page.locator("#ends .panel >> nth=0 >> g.arm >> nth=0 >> a").last
        dot.scroll_into_view_if_needed()
        dot.click()
        row = tab.page.locator("tr:target")
        assert row.is_visible()
        assert row.locator("td").first.text_content() == "9"
        assert "runs/rare_trigger-kbeta-s9-" in row.text_content()


def test_the_runs_can_be_downloaded(browser: Any, address: str) -> None:
    with Tab(browser, address, accept_downloads=True) as tab:
        with tab.page.expect_download() as waiting:
            tab.page.get_by_role("link", name="runs.csv").click()
        text = Path(waiting.value.path()).read_text(encoding="utf-8")
        assert waiting.value.suggested_filename == "runs.csv"
        assert len(list(csv.DictReader(io.StringIO(text)))) == 90
        assert tab.complaints == []


def test_with_scripts_off_everything_can_be_read_and_unfolded(browser: Any, address: str) -> None:
    with Tab(browser, address, java_script_enabled=False) as tab:
        assert tab.page.locator(".lead").is_visible()
        assert tab.page.locator(".effects svg >> nth=0").is_visible()
        tab.page.locator("#settings summary").click()
        assert tab.page.locator("#settings pre").first.is_visible()


def test_on_paper_the_folded_parts_are_there(browser: Any, address: str, tmp_path: Path) -> None:
    with Tab(browser, address) as tab:
        paper = tab.page.pdf(format="A4")
        assert paper.startswith(b"%PDF")
        folded = paper.count(b"/Type /Page\n") + paper.count(b"/Type /Page ")
        tab.page.evaluate("document.querySelectorAll('details').forEach(one => one.remove())")
        bare = tab.page.pdf(format="A4")
        assert folded > bare.count(b"/Type /Page\n") + bare.count(b"/Type /Page ") + 3


def test_hostile_names_stay_text(browser: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    curve = {"step": [1.0, 2.0, 3.0], "loss": [3.0, 2.0, 1.0]}
    ends: made_study.Ends = {
        EVIL: {s: made_study.finished(float(rng.normal(1, 0.1)), curve=curve) for s in range(4)}
        | {4: made_study.failed(EVIL)},
        "y": {s: float(rng.normal(2, 0.1)) for s in range(5)},
    }
    page = report.write(made_study.analysed(made_study.own(tmp_path / "out", ends, title=EVIL)))
    with Tab(browser, page.as_uri()) as tab:
        tab.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        tab.page.locator("#ends g.arm >> nth=0 >> a .point").last.hover()
        assert tab.complaints == []
        assert tab.page.locator("img").count() == 0
        assert tab.page.locator("script").count() == 1
        assert EVIL in tab.page.locator("#tip").text_content()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_violation(browser: Any, address: str, scheme: str) -> None:
    if not AXE.exists():
        pytest.skip("no axe-core: make browser")
    with Tab(browser, address, color_scheme=scheme) as tab:
        tab.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        tab.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = tab.page.evaluate("axe.run().then(result => result)")
        assert found["passes"]
        bad = [one for one in found["violations"] if one["impact"] in ("serious", "critical")]
        assert [(one["id"], one["nodes"][0]["html"], len(one["nodes"])) for one in bad] == []


def test_every_figure_can_be_saved_as_a_picture_of_its_own(browser: Any, address: str) -> None:
    with Tab(browser, address) as tab:
        figures, buttons = tab.page.locator("figure:has(> svg)"), tab.page.locator("button.save")
        assert buttons.count() == figures.count() > 3
        with tab.page.expect_download() as waiting:
            buttons.first.click()
        text = Path(waiting.value.path()).read_text(encoding="utf-8")
        assert waiting.value.suggested_filename == "effects.svg"
        assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
        assert tab.complaints == []
