"""How the PyTorch step time grows with parameters, tensors, buckets and threads: results/bench/growth.{json,png}.

python benchmarks/growth.py            a minute or two
python benchmarks/growth.py --large    parameters up to 10⁸, a few GB of memory
"""

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import torch
from contestants import torch_contestant, torch_parameters
from timing import alternate

from kourkoutas.torch import KourkoutasBeta

Series = list[tuple[int, float, float]]


def timed(shapes: list[tuple[int, ...]], buckets: Any = "parameter") -> tuple[float, float]:
    """Median seconds per step of K-β and of Adam fused."""
    names = torch_parameters(shapes)
    pair = {
        "adam": torch_contestant(torch.optim.Adam([p for _, p in names], fused=True), "adam"),
        "kbeta": torch_contestant(KourkoutasBeta(names, buckets=buckets), "adam"),
    }
    times = alternate(pair, rounds=9, seconds=4.0)
    return statistics.median(times["kbeta"]), statistics.median(times["adam"])


def with_parameters(largest: int) -> Series:
    """One tensor of 10³ … elements."""
    return [(n, *timed([(n,)])) for n in (10**k for k in range(3, largest + 1))]


def with_tensors() -> Series:
    """1 … 10⁴ tensors of 100 elements."""
    return [(n, *timed([(100,)] * n)) for n in (1, 10, 100, 1000, 10_000)]


def with_buckets() -> Series:
    """1000 tensors of 1000 elements in 1 … 1000 buckets."""
    return [(n, *timed([(1000,)] * 1000, lambda name, p, n=n: int(name[1:]) % n)) for n in (1, 10, 100, 1000)]


def with_threads() -> Series:
    """4 tensors of 10⁶ elements on 1 … all cores."""
    before = torch.get_num_threads()
    series = []
    for n in range(1, (os.cpu_count() or 1) + 1):
        torch.set_num_threads(n)
        series.append((n, *timed([(1000, 1000)] * 4)))
    torch.set_num_threads(before)
    return series


def draw(result: dict[str, Series], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(9, 7))
    for axis, (title, series) in zip(axes.flat, result.items(), strict=True):
        x = [n for n, _, _ in series]
        axis.plot(x, [1e6 * t for _, t, _ in series], "o-", label="K-β")
        axis.plot(x, [1e6 * t for _, _, t in series], "s--", label="Adam fused")
        if title != "threads":
            axis.set_xscale("log")
            axis.set_yscale("log")
        axis.set_xlabel(title)
        axis.set_ylabel("µs per step")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="go to 10⁸ parameters instead of 10⁷")
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    options = parser.parse_args()
    result = {
        "parameters": with_parameters(8 if options.large else 7),
        "tensors": with_tensors(),
        "buckets": with_buckets(),
        "threads": with_threads(),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "growth.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(result, options.out / "growth.png")


if __name__ == "__main__":
    main()
