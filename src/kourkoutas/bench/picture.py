"""The ratios as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def draw(result: dict[str, Any], path: str | Path) -> None:
    """One panel per framework, one bar per contestant and shape: its time divided by Adam's, with a line at 1."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in result["rows"] if r["contestant"] != r["baseline"]]
    frameworks = list(dict.fromkeys(r["framework"] for r in rows))
    figure, axes = plt.subplots(len(frameworks), 1, figsize=(9, 3.2 * len(frameworks)), squeeze=False)
    for axis, framework in zip(axes[:, 0], frameworks, strict=True):
        mine = [r for r in rows if r["framework"] == framework]
        shapes = list(dict.fromkeys(r["shape"] for r in mine))
        names = list(dict.fromkeys(r["contestant"] for r in mine))
        for j, name in enumerate(names):
            points = [(shapes.index(r["shape"]), r) for r in mine if r["contestant"] == name]
            at = [i + 0.8 * (j + 0.5) / len(names) - 0.4 for i, _ in points]
            axis.bar(
                at, [r["ratio"] for _, r in points], 0.75 / len(names), label=f"{name} / {points[0][1]['baseline']}"
            )
            for x, (_, r) in zip(at, points, strict=True):
                axis.annotate(f"{r['ratio']:.2f}", (x, r["ratio"]), ha="center", va="bottom", fontsize=6)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_xticks(range(len(shapes)), shapes)
        axis.set_ylabel("time per step, ratio")
        axis.set_yscale("log")
        axis.set_title(framework)
        axis.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
