"""The report: what it says, that it is self-contained, and how a real browser shows it offline."""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import image as images

from kourkoutas.lab.judging import tables
from kourkoutas.lab.results import store
from kourkoutas.lab.showing import report
from kourkoutas.lab.showing.figures import TraceData
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from kourkoutas.lab.testbeds import Endpoint
from kourkoutas.trace import Trace

TABLE = Path(__file__).parent / "data" / "rare_trigger.csv"
LAST = Endpoint("last_batch_bce", "last-batch BCE", log=True, threshold=1e-2)
HELD_OUT = Endpoint("heldout_bce", "held-out BCE")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


def study(**changes: object) -> report.ReportData:
    """The paper's Testbed C table as a study, with controls, a second endpoint, a diverged, a failed and a lost run."""
    rng = np.random.default_rng(0)
    table = tables.read_table(TABLE)
    arms = (*table, "kbeta-static", "kbeta-exact", "adam-mid", "adam95-warm", "adam999-warm", "lion")
    factor = {"kbeta-static": 1.0, "kbeta-exact": 1.12, "adam-mid": 1.11, "adam95-warm": 1.0, "adam999-warm": 1.0}
    steps = np.arange(500, 30_001, 500)
    runs = []
    for k, arm in enumerate(arms):
        for seed in range(10):
            # the made-up arms differ from kbeta by a factor and by noise whose logarithms sum to zero over the seeds
            noise = 10 ** (0.01 * math.sin(k + 2 * math.pi * (1 + k % 4) * seed / 10))
            value = table[arm][seed] if arm in table else table["kbeta"][seed] * factor.get(arm, 3) * noise
            status = {("lion", 3): "diverged", ("lion", 4): "failed", ("lion", 5): "unfinished"}.get((arm, seed), "ok")
            loss = value + np.exp(-steps / (4000 + 500 * k)) * rng.uniform(0.8, 1.2, len(steps))
            trace = None
            if arm == "kbeta":
                sun = np.clip(rng.normal(0.5, 0.1, (len(steps), 3)), 0, 0.99)
                trace = TraceData(steps, sun, 0.999 - 0.119 * sun)
            stop = 24 if status == "diverged" else len(steps)
            ok = status == "ok"
            runs.append(
                report.Run(
                    optimizer=arm,
                    seed=seed,
                    status=status,
                    endpoint=value if ok else None,
                    metrics={"last_batch_bce": value, "heldout_bce": 0.05 + 0.001 * (k + rng.normal())} if ok else {},
                    curve={"step": list(steps[:stop]), "loss": list(loss[:stop])} if status != "failed" else {},
                    trace=trace,
                    error="Traceback …\nRuntimeError: <no memory> & more" if status == "failed" else None,
                )
            )
    data = report.ReportData(
        title="Rare trigger: kbeta against Adam",
        study={"testbed": "rare_trigger", "preset": "paper", "engine": "jax", "created": "2026-01-01T00:00:00+00:00"},
        command="kbeta study rare_trigger --seeds 0-9 --optimizers kbeta,adam95 --set 'note=<b>'",
        endpoints=(LAST, HELD_OUT),
        arms=arms,
        seeds=tuple(range(10)),
        runs=tuple(runs),
        contrasts=(("kbeta", "adam95"), ("kbeta", "adam999"), ("kbeta", "lion")),
        settings={"steps": 30_000, "lr": 1e-2},
        options={"kbeta": {"beta2_min": 0.88, "beta2_max": 0.999}, "adam95": {"beta2": 0.95}},
        environment={"processor": "a processor", "cores": 2},
        versions={"numpy": "2.4"},
    )
    if "arms" in changes and "contrasts" not in changes:
        first, *others = changes["arms"]  # type: ignore[misc]
        changes["contrasts"] = [(first, other) for other in others]
    return replace(data, **changes)  # type: ignore[arg-type]


def small(**changes: object) -> report.ReportData:
    """Two arms, one endpoint, two seeds, no curves: a page in a fraction of a second."""
    runs = [
        report.Run(a, s, "ok", metrics={"last_batch_bce": v + s}) for a, v in (("x", 1.0), ("y", 1.5)) for s in (0, 1)
    ]
    return study(**{"endpoints": (LAST,), "arms": ("x", "y"), "seeds": (0, 1), "runs": runs, **changes})


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
        self.text += " " if tag in ("td", "th") else ""
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def page() -> str:
    return report.render(study())


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", Reader(page).text)


def test_the_page_is_well_formed(page: str) -> None:
    assert Reader(page).open == []


def test_the_page_opens_with_a_plain_answer_per_comparison_and_endpoint(page: str) -> None:
    text = text_of(page)
    assert (
        "Does kbeta beat adam95 here? Yes, by last-batch BCE: kbeta ends better than adam95 (geometric-mean ratio "
        in text
    )
    assert "adam95/kbeta 1.099 [1.045, 1.155], better on 8 of 10 seeds)" in text
    assert "4.127 [2.117, 8.043]" in text
    assert text.index("Does kbeta beat adam999 here?") < text.index("Every seed")


def test_every_seeds_pair_is_in_the_page(page: str) -> None:
    text = text_of(page)
    for by_seed in tables.read_table(TABLE).values():
        for value in by_seed.values():
            assert f"{value:.6g}" in text
    assert "1.199" in text  # the paper's ratio for seed 0


def test_effect_sizes_stand_before_p_values(page: str) -> None:
    text = text_of(page)
    assert text.index("Effect sizes") < text.index("t(9) = 4.288")
    assert text.index("BCa bootstrap") < text.index("0.00977")


def test_both_endpoints_stand_side_by_side(page: str) -> None:
    text = text_of(page)
    assert "All endpoints side by side" in text
    row = text[text.index("All endpoints side by side") :]
    assert re.search(r"kbeta vs adam95 ratio 1\.099 \[1\.045, 1\.155\] 8/0/2 difference 0\.00", row)


def test_diverged_failed_and_unfinished_runs_are_counted_and_shown(page: str) -> None:
    text = text_of(page)
    assert "lion 7 1 1 1" in text
    assert "Failed: lion, seed 4" in text
    assert "RuntimeError: <no memory> & more" in text
    assert "diverged: kbeta 0, lion 1 of 8, so the answer is by signed ranks" in text


def test_settings_command_machine_and_versions_are_in_the_page(page: str) -> None:
    text = text_of(page)
    for expected in ("--set 'note=<b>'", "beta2_min = 0.88", "30000", "a processor", "numpy", "2026-01-01"):
        assert expected in text


@pytest.mark.parametrize(
    ("treatment", "baseline", "answer", "phrase"),
    [
        ([1, 1.1, 1.2, 1.05], [2, 2.2, 2.1, 2.3], "Yes", "ends better"),
        ([2, 2.2, 2.1, 2.3], [1, 1.1, 1.2, 1.05], "No", "ends worse"),
        ([1, 2, 3, 4], [2, 1, 4, 3], "Not shown", "the interval includes no difference"),
        ([1, 2, 3], [1, 2, 3], "No difference", "the same value on all 3 seeds"),
        ([1], [2], "Cannot tell", "one finite pair"),
        ([1, 1, 1, math.nan], [2, 2, 2, 2], "Not shown", "diverged: new 1, old 0 of 4"),
        ([math.nan] * 2, [math.nan] * 2, "Cannot tell", "no pair of finite runs"),
    ],
)
def test_answers_say_what_the_data_support(
    treatment: list[float], baseline: list[float], answer: str, phrase: str
) -> None:
    runs = [
        report.Run(name, seed, "ok" if math.isfinite(x) else "diverged", endpoint=x)
        for name, values in (("new", treatment), ("old", baseline))
        for seed, x in enumerate(values)
    ]
    end = Endpoint("endpoint", "loss")
    data = study(endpoints=(end,), arms=("new", "old"), runs=runs, seeds=tuple(range(len(treatment))))
    judged = report.judge(data, end)
    assert judged.comparison is not None
    short, sentence = report.answer(judged.comparison.contrasts[0], judged)
    assert short == answer
    assert phrase in sentence
    assert sentence in text_of(report.render(data))


def test_a_result_that_holm_takes_back_is_not_shown() -> None:
    rng = np.random.default_rng(3)
    base = rng.normal(1, 0.1, 8)
    shift = np.array([0.5, 0.9, 0.1, 1.2, -0.3, 0.8, 0.4, 0.2])  # paired t: p = 0.02 alone, above 0.05 among eight
    values = {"kbeta": base, "first": base + shift, **{f"n{i}": base + rng.normal(0, 1, 8) for i in range(7)}}
    runs = [report.Run(name, s, "ok", endpoint=float(x)) for name, xs in values.items() for s, x in enumerate(xs)]
    end = Endpoint("endpoint", "loss")
    judged = report.judge(study(endpoints=(end,), arms=tuple(values), runs=runs), end)
    assert judged.comparison is not None
    short, sentence = report.answer(judged.comparison.contrasts[0], judged)
    assert judged.comparison.contrasts[0].t.p is not None
    assert judged.comparison.contrasts[0].t.p < 0.05
    assert short == "Not shown"
    assert "not after Holm's adjustment" in sentence
    assert "After Holm's adjustment for 8 comparisons p = " in sentence


def test_attribution_names_the_cause_that_the_controls_show(page: str) -> None:
    # kbeta-static and adam95-warm end as kbeta does, adam-mid and kbeta-exact about as much higher as adam95
    text = text_of(page)
    found = re.search(r"kbeta ends better than adam95 \(1\.099 \[1\.045, 1\.155\]\)\. (.*?) kbeta ends", text)
    assert found is not None
    assert "The data support as a cause: the hidden warmup (in 3 of 3 contrasts)." in found[1]
    assert "Not supported as a cause: the dynamics of β2, the mean value of β2." in found[1]
    assert "Against adam95 with the same warmup the data support no remaining difference" in found[1]


def test_attribution_calls_the_dynamics_a_cause_when_only_they_help() -> None:
    values = {"kbeta": 1.0, "adam95": 1.5, "kbeta-static": 1.5, "adam-mid": 1.5, "adam95-warm": 1.5, "kbeta-exact": 1.0}
    # noise that is different in each arm and sums to zero over the seeds
    data = {
        arm: {s: level * (1 + 0.01 * math.sin(1 + k + 2 * math.pi * (1 + k % 4) * s / 10)) for s in range(10)}
        for k, (arm, level) in enumerate(values.items())
    }
    judged = report.Judged(LAST, data, log=True, comparison=None, notes=())
    found = report.attribute(judged)
    assert found is not None
    assert [cause.cause for cause in found.causes] == ["Dynamics", "Mean β2", "Hidden warmup"]
    assert "The data support as a cause: the dynamics of β2." in found.summaries[0]
    assert "Not supported as a cause: the mean value of β2, the hidden warmup." in found.summaries[0]
    assert "with the same warmup a difference remains (1.5" in found.summaries[0]
    assert found.causes[0].findings[0].sentence == "Supported: kbeta ends better than kbeta-static."


def test_attribution_needs_control_arms_and_says_which_are_missing() -> None:
    both = {arm: {s: level + 0.01 * s for s in range(5)} for arm, level in (("kbeta", 1.0), ("adam95", 2.0))}
    assert report.attribute(report.Judged(LAST, both, log=False, comparison=None, notes=())) is None
    assert "What does the work?" not in report.render(small())
    one = {
        **both,
        "adam95": {s: 2.0 + 0.1 * s for s in range(5)},
        "kbeta-static": {s: 1.5 + 0.02 * s for s in range(5)},
    }
    found = report.attribute(report.Judged(LAST, one, log=True, comparison=None, notes=()))
    assert found is not None
    assert "Not examined, for lack of the arm: the mean value of β2, the hidden warmup." in found.summaries[0]


def test_without_a_difference_there_is_nothing_to_attribute() -> None:
    rng = np.random.default_rng(0)
    data = {arm: {s: rng.normal(1, 0.1) for s in range(6)} for arm in ("kbeta", "adam95", "kbeta-static")}
    found = report.attribute(report.Judged(HELD_OUT, data, log=False, comparison=None, notes=()))
    assert found is not None
    assert "the data support no difference that needs a cause" in found.summaries[0]


def test_a_study_without_finished_runs_still_has_a_page() -> None:
    runs = [report.Run("kbeta", 0, "unfinished"), report.Run("adam95", 0, "failed", error=None)]
    text = text_of(report.render(study(arms=("kbeta", "adam95"), seeds=(0,), runs=runs)))
    assert "there is nothing to compare yet" in text
    assert "no error was recorded" in text


def test_values_without_a_logarithm_are_compared_as_differences() -> None:
    runs = [
        report.Run(a, s, "ok", metrics={"last_batch_bce": v + s}) for a, v in (("x", 0.0), ("y", 1.5)) for s in (0, 1)
    ]
    text = text_of(report.render(study(endpoints=(LAST,), arms=("x", "y"), seeds=(0, 1), runs=runs)))
    assert "Values at or below 0 have no logarithm" in text
    assert "mean difference y − x 1.5" in text


def test_arms_without_a_common_seed_are_noted() -> None:
    runs = [report.Run("x", 0, "ok", endpoint=1.0), report.Run("y", 1, "ok", endpoint=1.0)]
    end = Endpoint("endpoint", "loss")
    text = text_of(report.render(study(endpoints=(end,), arms=("x", "y"), seeds=(0, 1), runs=runs)))
    assert "x and y have no seed in common: not compared." in text


def test_names_from_outside_cannot_inject_markup() -> None:
    evil = "<script>alert(1)</script>"
    runs = [report.Run(evil, 0, "ok", endpoint=1.0), report.Run("y", 0, "ok", endpoint=2.0)]
    end = Endpoint("endpoint", evil)
    page = report.render(study(title=evil, endpoints=(end,), arms=(evil, "y"), seeds=(0,), runs=runs))
    assert "script" not in {tag for tag, _ in Reader(page).tags}


def test_build_writes_the_file_and_nothing_else(tmp_path: Path) -> None:
    out = report.build(small(), tmp_path / "new" / "report.html")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["report.html"]
    assert out.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


def test_build_without_a_place_to_write_to_is_an_error() -> None:
    with pytest.raises(ValueError, match="`out` must name the file"):
        report.build(small())


def test_a_results_folder_becomes_a_page_inside_it(tmp_path: Path) -> None:
    arms = [store.Arm(label=name, optimizer=name) for name in ("kbeta", "adam95", "adam999")]
    setup: dict[str, Any] = {"testbed": "rare_trigger", "preset": "smoke", "engine": "jax", "settings": {"steps": 40}}
    table = tables.read_table(TABLE)
    for command in ("kbeta study rare_trigger --seeds 0-1", "kbeta study rare_trigger --seeds 0-2"):
        with store.writing(tmp_path / "out", **setup, arms=arms, seeds=range(3), command=command) as writer:
            for arm in arms:
                for seed in range(3):
                    spec = RunSpec(**setup, optimizer=arm.label, seed=seed)
                    writer.plan([spec])
                    if arm.label == "kbeta":
                        trace = Trace(["w"])
                        trace.pull(np.full((1024, 2, 1), 0.5, np.float32), count=40)
                        trace.save(writer.folder(spec) / "trace.npz")
                    if (arm.label, seed) == ("adam999", 2):
                        continue
                    value = table[arm.label][seed]
                    result = RunResult(
                        status="ok",
                        endpoint=value,
                        metrics={"last_batch_bce": value, "heldout_bce": 0.05, "train_loss": 0.05 + value},
                        curve={"step": [20.0, 40.0], "loss": [0.6, value]},
                        settings={"steps": 40, "optimizer": {"family": "adam", "beta2": 0.95}},
                    )
                    if (arm.label, seed) == ("adam999", 1):
                        result = RunResult(status="diverged", curve={"step": [20.0], "loss": [math.nan]})
                    writer.finish(spec, result)
    page = report.build(store.Study.open(tmp_path / "out"))
    assert page == tmp_path / "out" / "report.html"
    text = text_of(page.read_text(encoding="utf-8"))
    # three seeds: p = 0.034 alone, 0.067 after Holm's adjustment for two contrasts
    assert "Does kbeta beat adam95 here? Not shown, by BCE of the last batch" in text
    assert "held-out BCE (secondary): kbeta and adam95 end with the same value on all 3 seeds." in text
    assert "adam999 1 1 0 1" in text
    assert "kbeta study rare_trigger --seeds 0-1 kbeta study rare_trigger --seeds 0-2" in text
    assert "adam95 family = adam, beta2 = 0.95" in text
    assert "Density of sun and β2 over training, all buckets: kbeta, 3 runs" in text


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    tags = Reader(page).tags
    links = [a[key] for _, a in tags for key in ("src", "href", "data", "action", "srcset", "poster") if a.get(key)]
    assert links
    assert all(str(link).startswith("data:") for link in links)
    assert not re.search(r"url\(|@import|<script", page)
    assert any("default-src 'none'" in str(a.get("content")) for tag, a in tags if tag == "meta")


def test_every_picture_is_a_whole_svg_with_a_description(page: str) -> None:
    pictures = [a for tag, a in Reader(page).tags if tag == "img"]
    assert len(pictures) == 2 * 3 + 1 + 2
    for attributes in pictures:
        assert attributes["alt"]
        kind, _, content = str(attributes["src"]).partition(",")
        assert kind == "data:image/svg+xml;base64"
        root = ElementTree.fromstring(base64.b64decode(content))
        assert root.tag.endswith("svg")
        assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 20


FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--v=0",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # offline
)
# measures the page from inside, in a copy that may run it: natural and shown size of each picture, overflow of the page
PROBE = """<pre id="probe"></pre><script>addEventListener("load", () => {
  const pictures = [...document.images].map(i => [i.naturalWidth, i.naturalHeight, i.clientWidth, i.clientHeight]);
  const root = document.documentElement;
  document.getElementById("probe").textContent = JSON.stringify(
    {pictures, overflow: root.scrollWidth - root.clientWidth, height: root.scrollHeight});
});</script>"""


CONTROL = "http://127.0.0.1:9/control.css"  # nothing listens on the discard port


def chromium(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def requests(log: Path) -> list[tuple[str, int]]:
    """(URL, purpose) of each request in Chromium's network log, its own services' among them."""
    events = [event.get("params", {}) for event in json.loads(log.read_text(encoding="utf-8"))["events"]]
    return [(p["url"], p["traffic_annotation"]) for p in events if "url" in p and "traffic_annotation" in p]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium")
def test_chromium_shows_the_page_offline_without_errors_or_requests(page: str, tmp_path: Path) -> None:
    built, shot = tmp_path / "report.html", tmp_path / "shot.png"
    built.write_text(page, encoding="utf-8")
    log = tmp_path / "net.json"
    done = chromium(tmp_path, f"--log-net-log={log}", f"--screenshot={shot}", "--window-size=1280,6000", built.as_uri())
    assert "CONSOLE" not in done.stderr
    pixels = images.imread(io.BytesIO(shot.read_bytes()))[..., :3]
    assert pixels.shape == (6000, 1280, 3)
    assert pixels.std() > 0.05

    # a copy that may run the probe, and that asks for one thing outside: the control of this test
    probe = tmp_path / "probe.html"
    control = f'<link rel="stylesheet" href="{CONTROL}">{PROBE}</body>'
    free = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page)
    probe.write_text(free.replace("</body>", control), encoding="utf-8")
    control_log = tmp_path / "control.json"
    for width in (1280, 480):
        size = f"--window-size={width},900"
        dom = chromium(tmp_path, f"--log-net-log={control_log}", "--dump-dom", size, probe.as_uri())
        found = re.search(r'<pre id="probe">(.*?)</pre>', dom.stdout)
        assert found is not None
        seen = json.loads(found[1])
        assert seen["overflow"] <= 0
        assert len(seen["pictures"]) == 9
        for natural_width, natural_height, shown_width, shown_height in seen["pictures"]:
            assert min(natural_width, natural_height, shown_width, shown_height) > 100
            assert shown_width / shown_height == pytest.approx(natural_width / natural_height, rel=0.02)
            assert shown_width <= width

    # Chromium calls services of its own; what a page asks for carries the purpose that the control's request has
    purposes = {purpose for url, purpose in requests(control_log) if url == CONTROL}
    assert purposes
    assert [url for url, purpose in requests(log) if purpose in purposes and url.startswith("http")] == []
