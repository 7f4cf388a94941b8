"""Every picture of README and docs, light and dark, from kept results: `make pictures`.

| picture     | from                                                                                     |
|-------------|------------------------------------------------------------------------------------------|
| spike       | norms.csv, gradient norms of a K-β run of testbed B; sunspike and β2 follow by the rule |
| seeds       | the test runs of testbed B in archive/memory_trial/B.csv                                 |
| sensitivity | the tuning runs of testbeds B, C and D there                                             |
| curves      | curves.csv, losses of ten runs of testbed B per optimizer                                |
| verdicts    | all runs of testbeds B, C and D in the archives there, K-β against each Adam, judged     |
|             | by the laboratory: paired by seed, luck of tuning counted, Holm over eight comparisons   |
| warmup      | the formula                                                                              |
| buckets     | buckets.csv, β2 of all parameters of a small network                                     |

runs.py beside this file made norms.csv, curves.csv and buckets.csv.
"""

from __future__ import annotations

import functools
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont
from PIL import Image, ImageColor, ImageDraw, ImageFont
from scipy import stats

from kourkoutas.lab.judging import comparing, endpoints
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.tuning import luck, trials

HERE = Path(__file__).parent
TRIAL = HERE.parents[1] / "archive" / "memory_trial"
ALPHA, BETA2_MIN, BETA2_MAX = 0.93, 0.88, 0.999
LABELS = {
    "kbeta": "K-β",
    "adam90": "Adam 0.9",
    "adam95": "Adam 0.95",
    "adam99": "Adam 0.99",
    "adam999": "Adam 0.999",
    "adam90-warm": "Adam 0.9, warmed up",
    "adam95-warm": "Adam 0.95, warmed up",
    "adam99-warm": "Adam 0.99, warmed up",
    "adam999-warm": "Adam 0.999, warmed up",
}
TESTBEDS = {
    "B": ("final_loss", "B · Heat3D PINN, final loss"),
    "C": ("heldout_bce", "C · rare trigger, held-out BCE"),
    "D": ("bpc", "D · character model, bits per character"),
}
# Okabe and Ito's colours, which colour-blind readers can tell apart; the first is lighter on dark.
THEMES = {
    "light": {"ink": "#24292f", "grid": "#d0d7de", "paper": "#ffffff", "kbeta": "#d55e00", "adam95": "#0072b2"},
    "dark": {"ink": "#e6edf3", "grid": "#3d444d", "paper": "#1e2129", "kbeta": "#ff8c42", "adam95": "#56b4e9"},
}
SHARED = {"adam999": "#009e73", "adam95-warm": "#cc79a7"}


def colour(theme: str, name: str) -> str:
    return {**SHARED, **THEMES[theme]}.get(name, THEMES[theme]["ink"])


def trial(testbed: str, phase: str) -> pd.DataFrame:
    table = pd.read_csv(TRIAL / f"{testbed}.csv")
    return table[table["phase"] == phase]


@functools.cache
def clear_differences(testbed: str) -> frozenset[str]:
    """The Adams from which K-β clearly differs, each at its own best learning rate."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(TRIAL / f"{testbed}.tar.xz") as archive:
            archive.extractall(folder, filter="data")
        study = Snapshot.read(Path(folder) / testbed)
    primary = endpoints.measures(study.record)[0]
    endpoint = primary.endpoint
    found = comparing.compare_pairs(
        endpoints.values(study.runs, primary),
        [("kbeta", arm) for arm in LABELS if arm != "kbeta"],
        log=endpoint.log,
        higher_is_better=endpoint.maximize,
        lost=luck.lost(study.record, trials.of_study(study, primary.score), endpoint),
        resamples=0,
    )
    for one in found.contrasts:
        print(
            f"{testbed}: K-β against {LABELS[one.baseline]}: {one.verdict}, p {one.p:.2g}, after Holm {one.p_holm:.2g}"
        )
    return frozenset(one.baseline for one in found.contrasts if one.verdict in ("better", "worse"))


def spike(theme: str) -> Figure:
    """Norm, sunspike and β2 above each other, with one spike followed down."""
    table = pd.read_csv(HERE / "norms.csv")
    norm, r = table["norm"].to_numpy(), 0.0
    sun = np.empty_like(norm)
    for t, n in enumerate(norm):
        r = ALPHA * r + (1 - ALPHA) * n
        sun[t] = n / (n + r)
    beta2 = BETA2_MAX - (BETA2_MAX - BETA2_MIN) * sun
    shown = slice(179, 340)
    steps = table["step"][shown]
    at = shown.start + int(np.argmax(sun[shown]))
    figure, axes = plt.subplots(3, 1, figsize=(8, 5), sharex=True, layout="constrained")
    curves = ((norm, "gradient norm", "adam95"), (sun, "sunspike", "adam999"), (beta2, "β2", "kbeta"))
    for axis, (values, label, name) in zip(axes, curves, strict=True):
        axis.axvline(at + 1, color=THEMES[theme]["grid"], lw=5, zorder=0)
        axis.plot(steps, values[shown], color=colour(theme, name), lw=1.6)
        axis.plot(at + 1, values[at], "o", color=colour(theme, name), ms=6)
        axis.set_ylabel(label)
    axes[0].set_yscale("log")
    axes[1].set_ylim(0, 1)
    axes[2].set_ylim(0.875, 1.004)
    axes[2].axhline(BETA2_MAX, color=THEMES[theme]["ink"], lw=1, ls="--")
    axes[2].text(246, 0.978, "Adam: 0.999, always", ha="right", fontsize=9)
    axes[2].set_xlabel("training step")
    before = norm[at - 10 : at].mean()
    notes = (
        f"1  A spike: the norm is {norm[at] / before:.0f} times its mean of the ten steps before.",
        f"2  Its ratio to the moving average, squashed below 1, rises to {sun[at]:.2f}.",
        f"3  β2 falls to {beta2[at]:.2f} for this step: old squares are forgotten sooner. Then it recovers.",
    )
    for axis, note in zip(axes, notes, strict=True):
        axis.set_title(note, fontsize=10, loc="left")
    return figure


def curves(theme: str) -> Figure:
    """The loss of ten runs per optimizer of testbed B, all at the paper's learning rate."""
    table = pd.read_csv(HERE / "curves.csv", index_col="step")
    arms = ["kbeta", "adam95", "adam999"]
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True, layout="constrained")
    for axis, arm in zip(axes, arms, strict=True):
        for name in table.columns[table.columns.str.startswith(f"{arm}-")]:
            axis.plot(table.index, table[name], color=colour(theme, arm), lw=1, alpha=0.8)
        axis.set_title(LABELS[arm], fontsize=10)
        axis.set_xlabel("training step")
    axes[0].set_yscale("log")
    axes[0].set_ylabel("loss")
    return figure


def seeds(theme: str) -> Figure:
    """The final loss of ten test seeds of testbed B, each optimizer at its own best learning rate."""
    table = trial("B", "test")
    arms = ["kbeta", "adam95-warm", "adam95", "adam99", "adam999"]
    figure, axis = plt.subplots(figsize=(8, 2.9), layout="constrained")
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
    axis.set_yticks(range(len(arms)), [LABELS[arm] for arm in reversed(arms)])
    axis.set_ylim(-0.5, len(arms) - 0.1)
    axis.set_xlabel("final loss of a run; the bar is the median of ten seeds")
    axis.text(1.01, len(arms) - 0.42, "succeed", transform=axis.get_yaxis_transform(), va="bottom", fontsize=9)
    return figure


def sensitivity(theme: str) -> Figure:
    """The endpoint against the learning rate, from the tuning runs."""
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    markers = {"kbeta": "o", "adam95": "s", "adam999": "^", "adam95-warm": "D"}
    for axis, (testbed, (endpoint, title)) in zip(axes, TESTBEDS.items(), strict=True):
        table = trial(testbed, "tuning")
        for arm, marker in markers.items():
            rows = table[table["arm"] == arm]
            values = rows[endpoint].where(rows["status"] == "ok", np.inf)
            mean = values.groupby(rows["lr"]).mean()
            mean = mean[np.isfinite(mean)]
            axis.plot(mean.index, mean, marker=marker, ms=4.5, lw=1.6, color=colour(theme, arm), label=LABELS[arm])
        axis.set_xscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("learning rate")
    axes[0].set_yscale("log")
    axes[0].set_ylim(1e-7, 1e4)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def verdicts(theme: str) -> Figure:
    """K-β against every Adam, each tuned: the ratio of endpoints over ten seeds with its interval."""
    rivals = [arm for arm in LABELS if arm != "kbeta"]
    figure, axes = plt.subplots(1, 3, figsize=(10, 3.9), sharey=True, layout="constrained")
    for axis, (testbed, (endpoint, title)) in zip(axes, TESTBEDS.items(), strict=True):
        table = trial(testbed, "test").pivot(index="seed", columns="arm", values=endpoint)
        for row, arm in enumerate(reversed(rivals)):
            logs = np.log(table[arm] / table["kbeta"]).to_numpy()
            half = stats.t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
            middle, low, high = np.exp([logs.mean(), logs.mean() - half, logs.mean() + half])
            clear = arm in clear_differences(testbed)
            shade = colour(theme, "kbeta" if clear else "ink")
            axis.plot([low, high], [row, row], color=shade, lw=1.8)
            axis.plot(middle, row, "o", color=shade, mfc=shade if clear else THEMES[theme]["paper"], ms=6.5)
        axis.axvline(1, color=THEMES[theme]["ink"], lw=1)
        axis.set_title(title, fontsize=10)
        axis.set_yticks(range(len(rivals)), [LABELS[arm] for arm in reversed(rivals)])
        if testbed == "B":
            axis.set_xscale("log")
            axis.set_xlabel("Adam's loss ÷ K-β's\n← Adam lower        K-β lower →")
        else:
            axis.xaxis.set_major_formatter(lambda x, _: f"{round(100 * (x - 1)):+d} %".replace("+0", "0"))
            axis.set_xlabel("Adam's value relative to K-β's\n← Adam lower        K-β lower →")
    return figure


def warmup(theme: str) -> Figure:
    """The learning rate that "beta2max" leaves of yours in a calm stretch."""
    t = np.arange(1, 10_001)
    calm = (BETA2_MIN + BETA2_MAX) / 2
    factor = np.sqrt((1 - BETA2_MAX**t) / (1 - calm**t))
    figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
    axis.plot(t, factor, color=colour(theme, "kbeta"), lw=2, label='"beta2max", the default')
    axis.axhline(1, color=colour(theme, "adam95"), lw=1.6, ls="--", label='"exact"')
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
    return figure


def buckets(theme: str) -> list[Image.Image]:
    """β2 of every parameter of a small network as it trains, with a trail of the steps before; one image per frame."""
    table = pd.read_csv(HERE / "buckets.csv", index_col="step")
    look, dot, font = THEMES[theme], ImageColor.getrgb(colour(theme, "kbeta")), findfont("DejaVu Sans")
    small, large = ImageFont.truetype(font, 13), ImageFont.truetype(font, 15)
    paper, left, right, top, line, trail = ImageColor.getrgb(look["paper"]), 130, 620, 46, 24, 8
    bottom = top + line * len(table.columns)

    def x(beta2: float) -> float:
        return left + (right - left) * (beta2 - BETA2_MIN) / (BETA2_MAX - BETA2_MIN)

    blank = Image.new("RGB", (660, bottom + 44), paper)
    draw = ImageDraw.Draw(blank)
    for row, name in enumerate(table.columns):
        layer, _, kind = name.partition(".")
        draw.text(
            (left - 12, top + line * (row + 0.5)), f"layer {int(layer) // 2 + 1} {kind}", look["ink"], small, "rm"
        )
    for beta2 in (0.88, 0.9, 0.92, 0.9395, 0.96, 0.98, 0.999):
        width = 3 if beta2 == 0.9395 else 1
        draw.line((x(beta2), top, x(beta2), bottom), look["grid"], width)
        draw.text((x(beta2), bottom + 12), f"{beta2:g}", look["ink"], small, "mm")
    draw.text(((left + right) / 2, bottom + 32), "spike ←   β2   → falling norms", look["ink"], small, "mm")
    frames = []
    for last in range(0, len(table), 4):
        frame = blank.copy()
        draw = ImageDraw.Draw(frame)
        draw.text((left, top - 24), f"step {table.index[last]}", look["ink"], large, "lm")
        for age in range(min(trail, last), -1, -1):
            share = 1 if age == 0 else 0.4 * (1 - age / (trail + 1))
            fill = tuple(round(share * a + (1 - share) * b) for a, b in zip(dot, paper, strict=True))
            radius = 7 if age == 0 else 4
            for row, beta2 in enumerate(table.iloc[last - age]):
                middle = top + line * (row + 0.5)
                draw.ellipse((x(beta2) - radius, middle - radius, x(beta2) + radius, middle + radius), fill)
        frames.append(frame.quantize(32, dither=Image.Dither.NONE))
    return frames


PICTURES: dict[str, Callable[[str], Figure]] = {
    "spike": spike,
    "curves": curves,
    "seeds": seeds,
    "sensitivity": sensitivity,
    "verdicts": verdicts,
    "warmup": warmup,
}


def main(names: list[str]) -> None:
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
            if not names or "buckets" in names:
                first, *rest = buckets(theme)
                first.save(HERE / f"buckets-{theme}.gif", save_all=True, append_images=rest, duration=120, loop=0)


if __name__ == "__main__":
    main(sys.argv[1:])
