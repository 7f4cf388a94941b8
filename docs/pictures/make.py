"""Every picture of README and docs, light and dark, from kept results: `make pictures`.

| picture     | from                                                                                     |
|-------------|------------------------------------------------------------------------------------------|
| curves      | curves.csv, losses of ten runs of testbed B per optimizer                                |
| seeds       | the test runs of testbed B in archive/memory_trial/B.csv                                 |
| sensitivity | the tuning runs of testbeds B, C and D there                                             |
| verdicts    | all runs of testbeds B, C and D in the archives there, K-β against each Adam, judged     |
|             | by the laboratory: paired by seed, luck of tuning counted, eight comparisons a testbed   |
| eigenbasis  | the test runs of the finished problems in benchmarks/eigenbasis_trial/; what is clear,   |
|             | by trial.py there                                                                        |
| spike       | spikes.csv, update sizes around an event; β2 follows by the rule                         |
| spikes      | the same, with more optimizers                                                           |
| warmup      | the formula                                                                              |
| report      | a screenshot of the report on example.tar.xz, the runs of README's own example; needs    |
|             | Chromium                                                                                 |

`make pictures` draws them all, `python docs/pictures/make.py curves report` two. runs.py beside this file made
curves.csv and example.tar.xz, benchmarks/spikes.py made spikes.csv.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from PIL import Image

from kourkoutas.lab.judging import analysis, comparing, endpoints, sizes
from kourkoutas.lab.judging.headline import digits
from kourkoutas.lab.optimizers.looks import DARK, LIGHT, looks_of, name_of, versus
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.showing import report
from kourkoutas.lab.tuning import luck, trials

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRIAL = ROOT / "archive" / "memory_trial"
EIGENBASIS_TRIAL = ROOT / "benchmarks" / "eigenbasis_trial"
sys.path.insert(0, str(EIGENBASIS_TRIAL))

from trial import found_in  # noqa: E402

REPORTED = HERE / "example.tar.xz"
ALPHA, BETA2_MIN, BETA2_MAX = 0.93, 0.88, 0.999
ADAMS = ("adam90", "adam95", "adam99", "adam999", "adam90-warm", "adam95-warm", "adam99-warm", "adam999-warm")
TESTBEDS = {
    "B": ("final_loss", "B · Heat3D PINN, final loss"),
    "C": ("heldout_bce", "C · rare trigger, held-out BCE"),
    "D": ("bpc", "D · character model, bits per character"),
}
SCREEN = (1100, 860)  # CSS pixels of the screenshot
BLOWN_UP = 1e3  # a loss of testbed B above it; runs start at about 7
THEMES = {
    "light": {"ink": "#24292f", "soft": "#6e7781", "grid": "#d0d7de", "paper": "#ffffff"},
    "dark": {"ink": "#e6edf3", "soft": "#9198a1", "grid": "#3d444d", "paper": "#1e2129"},
}
# As in reports: K-β, Adam 0.95 and Adam 0.999 have one colour each everywhere.
LOOKS = looks_of(["kbeta", "adam95", "adam999", "adam95-warm", "kbeta-eigen"])
TRIED = ("kbeta-eigen", "eigen95", "soap", "muon", "kbeta")  # in the trial of the eigenbasis, beside four Adams
PROBLEMS = {  # of that trial: endpoint and title
    "emulator": ("error", "emulator of Kuramoto–Sivashinsky"),
    "darcy": ("error", "Darcy flow, FNO"),
    "D": ("bpc", "D · character model"),
    "C": ("heldout_bce", "C · rare trigger"),
    "pinnacle": ("error", "Wave1D-C, PINN"),
    "burgers": ("error", "Burgers, PINN"),
    "B": ("final_loss", "B · Heat3D, PINN"),
    "A": ("train_mse", "A · Heat2D surrogate"),
}


def colour(theme: str, arm: str) -> str:
    """An optimizer's colour; that of text for one that has none."""
    if arm not in LOOKS:
        return THEMES[theme]["ink"]
    return {"light": LIGHT, "dark": DARK}[theme][LOOKS[arm].colour]


def style(theme: str, arm: str) -> dict[str, str]:
    """Colour and dash of an optimizer's line."""
    return {"color": colour(theme, arm), "linestyle": LOOKS[arm].dash}


def trial(testbed: str, phase: str) -> pd.DataFrame:
    table = pd.read_csv(TRIAL / f"{testbed}.csv")
    return table[table["phase"] == phase]


@contextmanager
def unpacked(archive: Path) -> Iterator[Path]:
    """The results folder in an archive that `kept_runs.keep` made."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        yield Path(scratch) / archive.name.partition(".")[0]


@dataclass(frozen=True)
class Decision:
    """One comparison: whether the difference is clear, and the difference with the interval that decides it."""

    clear: bool
    value: float
    low: float
    high: float


@functools.cache
def decisions(testbed: str) -> dict[str, Decision]:
    """{Adam: K-β against it}, each at its own best learning rate; ratios on B, percent of Adam's value elsewhere.

    NOTE: Holm's procedure compares the k-th smallest of m p-values with 5 % / (m - k + 1), and stops at the first that
    is larger. An interval of the level at which its p was compared, or the procedure stopped, agrees with the verdict.
    """
    with unpacked(TRIAL / f"{testbed}.tar.xz") as folder:
        study = Snapshot.read(folder)
    primary = endpoints.measures_of(study.record)[0]
    endpoint = primary.endpoint
    question = comparing.Question(
        endpoints.values_of(study.runs, primary),
        log=endpoint.log,
        higher_is_better=endpoint.maximize,
        lost=luck.lost(study.record, trials.of_study(study, primary.score), endpoint),
    )
    pairs = [("kbeta", arm) for arm in ADAMS]
    (judged,) = comparing.judge([question], pairs, resamples=0, leave_one_out=False)
    found, stopped_at = {}, None
    for place, pair in enumerate(sorted(pairs, key=lambda pair: judged.paired[pair].decision.p)):
        paired, ruling = judged.paired[pair], judged.rulings[pair]
        clear = ruling.verdict in ("better", "worse")
        confidence = stopped_at or 1 - 0.05 / (len(pairs) - place)
        if not clear:
            stopped_at = confidence
        shown = (sizes.effect if endpoint.log else sizes.percent)(paired, confidence)
        ends = shown.interval
        print(
            f"{testbed}: {versus(*pair)}: {ruling.verdict}, p {paired.decision.p:.2g}, after Holm {ruling.p_holm:.2g}; "
            f"{shown.value:.3g} [{ends.low:.3g}, {ends.high:.3g}] at {100 * confidence:.1f} %"
        )
        found[pair[1]] = Decision(clear, shown.value, ends.low, ends.high)
    return found


@functools.cache
def losses() -> dict[str, pd.DataFrame]:
    """{arm: one column of losses per run} of testbed B at the paper's learning rate."""
    table = pd.read_csv(HERE / "curves.csv", index_col="step")
    found = {}
    for arm in ("kbeta-eigen", "kbeta", "adam95-warm", "adam95", "adam999"):
        runs = [name for name in table.columns if name.rpartition("-")[0] == arm]
        found[arm] = table[runs]
    return found


def curves(theme: str) -> Figure:
    """The loss of ten runs per optimizer of testbed B over the first steps."""
    found = losses()
    figure, axes = plt.subplots(1, len(found), figsize=(10, 3.7), sharey=True, layout="constrained")
    for axis, (arm, table) in zip(axes, found.items(), strict=True):
        axis.plot(table.index, table, color=colour(theme, arm), lw=0.9, alpha=0.8)
        axis.set_title(name_of(arm), fontsize=10.5, color=colour(theme, arm), fontweight="bold", pad=32)
        blown_up = int((table.max() > BLOWN_UP).sum())
        words = f"{blown_up} of {table.shape[1]} blow up\nmedian at the end {rounded(table.iloc[-1].median())}"
        axis.text(0.5, 1.03, words, transform=axis.transAxes, ha="center", va="bottom", fontsize=9)
        axis.set_xlim(0, table.index[-1])
        axis.set_xticks(range(0, int(table.index[-1]) + 1, 500))
        axis.set_xlabel("training step")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("loss")
    figure.suptitle(what_the_curves_show(found), fontsize=11.5)
    return figure


def what_the_curves_show(tables: dict[str, pd.DataFrame]) -> str:
    """Who blows up and who does not, and how far below K-β the eigenbasis is."""
    calm, blown = [], []
    for arm, table in tables.items():
        (blown if (table.max() > BLOWN_UP).any() else calm).append(name_of(arm))
    plain, turned = (tables[arm].iloc[-1].median() for arm in ("kbeta", "kbeta-eigen"))
    times = f"{digits(plain / turned)} times lower" if turned < plain else f"{digits(turned / plain)} times higher"
    return (
        "A physics-informed network, ten seeds, at the paper's learning rate: "
        f"{in_words(blown)} {'blows' if len(blown) == 1 else 'blow'} up,\n"
        f"{in_words(calm)} {'does' if len(calm) == 1 else 'do'} not, and "
        f"{name_of('kbeta-eigen')} ends {times} than {name_of('kbeta')}"
    )


def rounded(loss: float) -> str:
    """One digit: "5", "4e-2"."""
    return f"{loss:.0f}" if loss >= 1 else f"{loss:.0e}".replace("e-0", "e-")


def in_words(names: list[str]) -> str:
    """ "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def seeds(theme: str) -> Figure:
    """The final loss of ten test seeds of testbed B, each optimizer at its own best learning rate."""
    table = trial("B", "test")
    arms = ["kbeta", "adam95-warm", "adam95", "adam99", "adam999"]
    figure, axis = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for row, arm in enumerate(reversed(arms)):
        values = np.sort(table.loc[table["arm"] == arm, "final_loss"])
        shift = np.tile([-0.13, 0.13], 5)[: len(values)]
        axis.scatter(values, row + shift, s=34, color=colour(theme, arm), alpha=0.85, linewidths=0)
        axis.plot([np.median(values)] * 2, [row - 0.36, row + 0.36], color=THEMES[theme]["ink"], lw=2)
        good = int((values <= 9e-5).sum())
        axis.text(1.01, row, f"{good} of {len(values)}", transform=axis.get_yaxis_transform(), va="center")
    axis.axvline(9e-5, color=THEMES[theme]["ink"], lw=1, ls="--")
    axis.text(9e-5, len(arms) - 0.42, " the paper's mark of success, 9e-5", va="bottom", fontsize=9)
    axis.set_xscale("log")
    axis.set_yticks(range(len(arms)), [name_of(arm) for arm in reversed(arms)])
    axis.set_ylim(-0.5, len(arms) - 0.1)
    axis.set_xlabel("final loss of a run; the bar is the median of ten seeds")
    axis.text(1.01, len(arms) - 0.42, "succeed", transform=axis.get_yaxis_transform(), va="bottom", fontsize=9)
    figure.suptitle(
        "Each at its own best learning rate, a short memory succeeds and a long one does not", fontsize=11.5
    )
    return figure


def sensitivity(theme: str) -> Figure:
    """The endpoint against the learning rate, from the tuning runs."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.8), layout="constrained")
    markers = {"kbeta": "o", "adam95": "s", "adam999": "^", "adam95-warm": "D"}
    for axis, (testbed, (endpoint, title)) in zip(axes, TESTBEDS.items(), strict=True):
        table = trial(testbed, "tuning")
        for arm, marker in markers.items():
            rows = table[table["arm"] == arm]
            values = rows[endpoint].where(rows["status"] == "ok", np.inf)
            mean = values.groupby(rows["lr"]).mean()
            mean = mean[np.isfinite(mean)]
            axis.plot(mean.index, mean, marker=marker, ms=4.5, lw=1.6, **style(theme, arm), label=name_of(arm))
        axis.set_xscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("learning rate")
    axes[0].set_yscale("log")
    axes[0].set_ylim(1e-7, 1e4)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    title = (
        "D: K-β and warmed Adam tolerate eight times the learning rate that plain Adam does. C: all are nearly alike.\n"
        "B: Adam 0.999 fails at every learning rate, the others at two to four times their best one."
    )
    figure.suptitle(title, fontsize=11.5)
    return figure


def verdicts(theme: str) -> Figure:
    """K-β against every Adam, each tuned: the differences with the intervals that decide."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 4.2), sharey=True, layout="constrained")
    look, clear = THEMES[theme], 0
    for axis, (testbed, (_, title)) in zip(axes, TESTBEDS.items(), strict=True):
        for row, arm in enumerate(reversed(ADAMS)):
            found = decisions(testbed)[arm]
            clear += found.clear
            shade, width, inside = (
                (look["ink"], 3.2, look["ink"]) if found.clear else (look["soft"], 1.4, look["paper"])
            )
            axis.plot([found.low, found.high], [row, row], color=shade, lw=width, solid_capstyle="butt")
            axis.plot(found.value, row, "o", color=shade, mfc=inside, ms=6.5)
        axis.set_title(title, fontsize=10)
        axis.set_yticks(range(len(ADAMS)), [name_of(arm) for arm in reversed(ADAMS)])
        axis.set_ylim(-0.6, len(ADAMS) - 0.4)
        if testbed == "B":
            axis.axvline(1, color=look["ink"], lw=1)
            axis.set_xscale("log")
            axis.set_xlabel("Adam's loss ÷ K-β's\n← Adam better        K-β better →")
        else:
            axis.axvline(0, color=look["ink"], lw=1)
            axis.xaxis.set_major_locator(MultipleLocator(3))
            axis.xaxis.set_major_formatter(lambda x, _: f"{x:+.0f} %".replace("+0 %", "0 %").replace("-", "−"))
            axis.set_xlabel("K-β's gain, of Adam's value\n← Adam better        K-β better →")
    words = f"Each tuned, K-β differs clearly from Adam in {clear} of {3 * len(ADAMS)} comparisons"
    figure.suptitle(f"{words}, where the interval misses the line", fontsize=11.5)
    return figure


@functools.cache
def over_the_best_adam(problem: str) -> dict[str, np.ndarray] | None:
    """{optimizer: its end divided by that of the best Adam, by seed}, best by its median; None where runs are missing.

    A run that diverged counts as infinite.
    """
    file = EIGENBASIS_TRIAL / f"{problem}.csv"
    if not file.exists():
        return None
    endpoint, _ = PROBLEMS[problem]
    table = pd.read_csv(file).query("phase == 'test'")
    ends = table[endpoint].where(table["status"] == "ok", np.inf)
    by_seed = table.assign(end=ends).pivot(index="seed", columns="arm", values="end")
    adams = [arm for arm in by_seed if arm in ADAMS]
    if not {*TRIED} <= {*by_seed} or len(adams) < 4 or by_seed.isna().any(axis=None):
        return None
    best = by_seed[adams].median().idxmin()
    return {arm: (by_seed[arm] / by_seed[best]).to_numpy() for arm in TRIED}


@functools.cache
def is_ahead(problem: str) -> bool:
    """Whether K-β in the eigenbasis is clearly ahead of every Adam, as the claim of the trial asks."""
    with unpacked(EIGENBASIS_TRIAL / f"{problem}.tar.xz") as folder:
        found = found_in(folder)
    return found is not None and found.ahead


def eigenbasis(theme: str) -> Figure:
    """Each optimizer's end over that of the best Adam: the median of the seeds, and from the best seed to the worst."""
    ratios = {problem: over_the_best_adam(problem) for problem in PROBLEMS}
    finished = {problem: found for problem, found in ratios.items() if found is not None}
    far = [problem for problem, found in finished.items() if min(map(np.min, found.values())) < 0.05]
    near = [problem for problem in finished if problem not in far]
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 2.3 + 0.75 * len(finished)), layout="constrained", height_ratios=(len(near), len(far) + 0.1)
    )
    for axis, problems in ((upper, near), (lower, far)):
        _draw_ends(axis, theme, {problem: finished[problem] for problem in problems})
    upper.xaxis.set_minor_formatter(lambda x, _: f"{x:g}" if f"{x:e}"[0] in "25" else "")
    lower.set_xlabel(
        "end ÷ that of the best Adam on the same seed; mark: median, line: all seeds\n← better than the best Adam"
    )
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", ncols=len(TRIED), frameon=False)
    ahead = sum(map(is_ahead, finished))
    words = f"K-β in the eigenbasis is clearly ahead of every tuned Adam on {ahead} of {len(finished)} problems"
    figure.suptitle(words, fontsize=11.5)
    return figure


def _draw_ends(axis: Axes, theme: str, of_problems: dict[str, dict[str, np.ndarray]]) -> None:
    """A row for each problem, on one scale, the first at the top."""
    markers = dict(zip(TRIED, "oDs^v", strict=True))
    for row, found in enumerate(reversed(of_problems.values())):
        for place, (arm, ratio) in enumerate(found.items()):
            y, shade = row + 0.3 - 0.15 * place, colour(theme, arm)
            axis.plot([ratio.min(), ratio.max()], [y, y], color=shade, lw=1.6)
            axis.plot(np.median(ratio), y, markers[arm], color=shade, ms=6.5, label="" if row else name_of(arm))
    axis.axvline(1, color=THEMES[theme]["ink"], lw=1.2)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axis.set_yticks(range(len(of_problems)), [PROBLEMS[problem][1] for problem in reversed(of_problems)])
    axis.set_ylim(-0.55, len(of_problems) - 0.45)
    axis.grid(visible=False, axis="y")


def spike(theme: str) -> Figure:
    """One gradient that is too large: its norm, K-β's β2, and what becomes of the update."""
    table = events("spike")
    norm, r = table["norm"].to_numpy(), 1.0
    beta2 = np.empty_like(norm)
    for k, n in enumerate(norm):
        r = ALPHA * r + (1 - ALPHA) * n
        sun = n / (n + r)
        beta2[k] = BETA2_MAX - (BETA2_MAX - BETA2_MIN) * sun
    steps, at = table.index.to_numpy(), int(np.argmax(norm))
    figure, axes = plt.subplots(3, 1, figsize=(8, 5.6), sharex=True, layout="constrained", height_ratios=(1, 1, 2))
    axes[0].plot(steps, norm, color=THEMES[theme]["ink"], lw=1.6)
    axes[0].set_yscale("log")
    axes[0].set_ylabel("gradient norm")
    axes[1].plot(steps, beta2, color=colour(theme, "kbeta"), lw=1.6)
    axes[1].set_ylabel("K-β's β2")
    axes[1].set_ylim(0.87, 1.005)
    largest = {}
    for arm, column in (("kbeta", "K-β"), ("adam95", "AdamW 0.95"), ("adam999", "AdamW 0.999")):
        axes[2].plot(steps, table[column], **style(theme, arm), lw=1.8, label=name_of(arm))
        largest[arm] = table[column].max()
    axes[2].axhline(1, color=THEMES[theme]["soft"], lw=1, ls="--")
    axes[2].set_yscale("log")
    axes[2].set_yticks([0.1, 0.3, 1, 3, 10], ["÷ 10", "÷ 3", "as usual", "× 3", "× 10"])
    axes[2].set_ylabel("update")
    axes[2].set_xlabel("steps after the spike")
    axes[2].set_xlim(steps[0], 300)
    axes[2].legend(loc="upper right", frameon=False, ncols=3)
    notes = (
        "1  A spike: one gradient is 1,000 times as large as it would have been.",
        f"2  β2 is {beta2[at]:.2f} at that step, then {beta2[at + 1]:.3f}; after 100 steps it is back.",
        f"3  The update grows × {largest['kbeta']:.1f} (K-β), × {largest['adam95']:.1f} (Adam 0.95), "
        f"× {largest['adam999']:.0f} (Adam 0.999); then it is too small.",
    )
    for axis, note in zip(axes, notes, strict=True):
        axis.set_title(note, fontsize=10, loc="left")
    return figure


def events(event: str) -> pd.DataFrame:
    table = pd.read_csv(HERE / "spikes.csv", index_col="step")
    return table[table["event"] == event]


def spikes(theme: str) -> Figure:
    """Update sizes after a spike and after a fall, with optimizers made for spikes beside ours."""
    lines = {
        "AdamW 0.95": (style(theme, "adam95"), 3.0),  # wide ones first, since some lie on each other
        "AdamW 0.999": (style(theme, "adam999"), 1.6),
        "K-β": (style(theme, "kbeta"), 1.6),
        "Stable-SPAM 0.95": ({"color": THEMES[theme]["soft"], "linestyle": "-"}, 1.6),
        "AdaGC 0.95": ({"color": THEMES[theme]["ink"], "linestyle": "--"}, 1.4),
    }
    titles = {"spike": "a spike: one gradient × 1,000", "fall": "a fall: gradients × 0.01 from here on"}
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), sharey=True, layout="constrained")
    for axis, (event, title) in zip(axes, titles.items(), strict=True):
        table = events(event).loc[0:]
        axis.axhspan(0.9, 1.1, color=THEMES[theme]["grid"], lw=0)
        for name, (look, width) in lines.items():
            axis.plot(table.index, table[name], **look, lw=width, label=name)
        axis.set(xlabel="steps after it", yscale="log", xlim=(0, 400), ylim=(8e-3, 20))
        axis.set_title(title, fontsize=10)
    axes[0].set_yticks([0.01, 0.1, 1, 10], ["÷ 100", "÷ 10", "as without it", "× 10"])
    axes[0].set_ylabel("update")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    title = "K-β overshoots less than AdamW 0.95 and takes a little longer; AdaGC does not notice a spike"
    figure.suptitle(title, fontsize=11.5)
    return figure


def warmup(theme: str) -> Figure:
    """The learning rate that "beta2max" leaves of yours in a calm stretch."""
    t = np.arange(1, 10_001)
    calm = (BETA2_MIN + BETA2_MAX) / 2
    factor = np.sqrt((1 - BETA2_MAX**t) / (1 - calm**t))
    figure, axis = plt.subplots(figsize=(8, 3), layout="constrained")
    axis.plot(t, factor, color=colour(theme, "kbeta"), lw=2, label='"beta2max", the default')
    axis.axhline(1, color=THEMES[theme]["ink"], lw=1.4, ls="--", label='"exact"')
    for step in (1, 100, 1000, 2000):
        axis.plot(step, factor[step - 1], "o", color=colour(theme, "kbeta"), ms=6)
        shift = (0, 9) if step == 1 else (9, -10)
        text = f"{100 * factor[step - 1]:.0f} %"
        axis.annotate(text, (step, factor[step - 1]), shift, textcoords="offset points", fontsize=9.5)
    axis.set_xscale("log")
    axis.set_ylim(0, 1.12)
    axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
    axis.set_ylabel("of your learning rate")
    axis.set_xlabel("training step")
    axis.legend(loc="lower right", frameon=False)
    axis.set_title("The default starts with an eighth of your learning rate", fontsize=11.5)
    return figure


def screenshot() -> None:
    """The first screen of a tuned study's report, as a reader sees it in a window of 1,100 pixels."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
    if chromium is None:
        print("report.png stays as it is: no Chromium on this machine (apt-get install chromium)")
        return
    with unpacked(REPORTED) as folder:
        page = report.write(analysis.analyse(Snapshot.read(folder), resamples=0))
        picture = folder / "report.png"
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1.5"]
        size = f"--window-size={SCREEN[0]},{SCREEN[1]}"
        call = [chromium, *flags, size, f"--screenshot={picture}", page.as_uri()]
        subprocess.run(call, check=True, capture_output=True, timeout=120)
        with Image.open(picture) as image:
            # A third of the bytes; other methods lose the colours of thin lines.
            fewer = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        fewer.save(HERE / "report.png", optimize=True)


PICTURES: dict[str, Callable[[str], Figure]] = {
    "curves": curves,
    "seeds": seeds,
    "sensitivity": sensitivity,
    "verdicts": verdicts,
    "spike": spike,
    "spikes": spikes,
    "warmup": warmup,
    "eigenbasis": eigenbasis,
}


def main(names: list[str]) -> None:
    if unknown := set(names) - {*PICTURES, "report"}:
        sys.exit(f"no picture {', '.join(sorted(unknown))}: there are {', '.join(PICTURES)}, report")
    for theme, look in THEMES.items():
        inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
        settings = {
            **dict.fromkeys(inked, look["ink"]),
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "grid.color": look["grid"],
            "grid.linewidth": 0.5,
            "font.size": 10,
        }
        with plt.rc_context(settings):
            for name, make in PICTURES.items():
                if not names or name in names:
                    figure = make(theme)
                    # Without the version of matplotlib the same results give the same bytes.
                    figure.savefig(HERE / f"{name}-{theme}.png", dpi=150, transparent=True, metadata={"Software": None})
                    plt.close(figure)
    if not names or "report" in names:
        screenshot()


if __name__ == "__main__":
    main(sys.argv[1:])
