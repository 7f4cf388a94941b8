"""Recovery from a gradient spike, and from a fall: the set-up of NVIDIA's Emerging-Optimizers, with more optimizers.

    python benchmarks/spikes.py             the tables, as Markdown
    python benchmarks/spikes.py --picture   docs/pictures/spikes.png

Published: NVIDIA-NeMo/Emerging-Optimizers, docs/primer/gradient_spike/optimizer-update-comparison.md. One float32
parameter (128, 64) of zeros, lr 1, no weight decay; every gradient is standard normal (one generator, seed 0), times a
factor at one step (a spike) or from one step on (a fall). What is measured is the RMS of each step's update.

Two measures:

    recovery    theirs: steps after the spike until the RMS is first within 10 % of its mean over the last 30 of 200
    settled     ours: steps after the event until the RMS stays within 10 % of that of the same run without the event

NOTE: theirs counts an RMS that crosses the band on its way as recovered, and one that stays low until the end, too,
since the end is its yardstick. Ours takes the same gradients without the event as the yardstick, step by step, and the
last time outside counts; a warmup cancels out. At step 50 a long memory has hardly begun; hence a late event, too.

AdaGC, Stable-SPAM, StableAdamW and LaProp come from the package pytorch_optimizer 4.1.0; without it their rows are left
out.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kourkoutas.torch import KourkoutasBeta

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "spikes.png"
SHORT, LONG = 200, 2_000  # steps in all; steps after an event
EARLY, LATE = 50, 1_000
BAND, LAST = 0.1, 30
SPIKES = (1e2, 1e3, 1e4, 1e5)
FALLS = (1e-2, 1e-4)
PUBLISHED = {
    ("AdamW 0.95", 10): (7, 13, 26, 41),
    ("AdamW 0.95", 50): (9, 19, 33, 46),
    ("AdamW 0.95", 100): (15, 28, 44, 56),
    ("LaProp 0.65", 10): (4, 4, 4, 4),
    ("LaProp 0.65", 50): (1, 1, 1, 1),
    ("LaProp 0.65", 100): (1, 1, 1, 1),
}

Make = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def rules() -> dict[str, Make]:
    """The rows of the tables; β1 is 0.9 and ε 1e-8 unless the name says otherwise."""

    def adamw(beta2: float, beta1: float = 0.9) -> Make:
        return lambda ps: torch.optim.AdamW(ps, lr=1.0, betas=(beta1, beta2), eps=1e-8, weight_decay=0.0)

    found: dict[str, Make] = {
        "K-β": lambda ps: KourkoutasBeta(ps, lr=1.0),
        "K-β, exact": lambda ps: KourkoutasBeta(ps, lr=1.0, bias_correction="exact"),
        "AdamW 0.95": adamw(0.95),
        "AdamW 0.999": adamw(0.999),
        "AdamW, β1 = β2 = 0.95": adamw(0.95, 0.95),
    }
    try:
        import pytorch_optimizer as rivals
    except ImportError:
        sys.stderr.write("left out: AdaGC, Stable-SPAM, StableAdamW, LaProp; pip install pytorch-optimizer==4.1.0\n")
        return found
    common: dict[str, Any] = {"lr": 1.0, "betas": (0.9, 0.95), "weight_decay": 0.0, "eps": 1e-8}
    return found | {
        # Its warmup clips at a norm that suits the model; the calm norm here is √8192 = 90.5.
        "AdaGC 0.95": lambda ps: rivals.AdaGC(ps, lambda_abs=100.0, **common),
        "Stable-SPAM 0.95": lambda ps: rivals.StableSPAM(ps, **common),
        "StableAdamW 0.95": lambda ps: rivals.StableAdamW(ps, kahan_sum=False, **common),
        "LaProp 0.65": lambda ps: rivals.LaProp(ps, **{**common, "betas": (0.9, 0.65)}),
    }


@functools.cache
def _gradients(steps: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.stack([torch.randn(128, 64, generator=draw) for _ in range(steps)])


def rms(make: Make, event: Callable[[int], float], steps: int) -> NDArray[np.float64]:
    """The RMS of every step's update, when step k's gradient is multiplied by event(k)."""
    p = torch.zeros(128, 64)
    optimizer = make([p])
    sizes = []
    for k, g in enumerate(_gradients(LATE + LONG)[:steps]):
        before = p.clone()
        p.grad = g * event(k)
        optimizer.step()
        sizes.append(float((before - p).square().mean().sqrt()))
    return np.array(sizes)


def spike(scale: float, at: int) -> Callable[[int], float]:
    return lambda k: scale if k == at else 1.0


def fall(scale: float, at: int) -> Callable[[int], float]:
    return lambda k: scale if k >= at else 1.0


def recovery(sizes: Sequence[float], at: int) -> int | None:
    """Steps after `at` until the size is first within the band around the mean of the last 30; None if never."""
    sizes = np.asarray(sizes)
    target = sizes[-LAST:].mean()
    inside = np.flatnonzero(np.abs(sizes[at + 1 :] - target) <= BAND * target)
    return int(inside[0]) + 1 if inside.size else None


def settled(sizes: Sequence[float], calm: Sequence[float], at: int) -> int | None:
    """Steps after `at` until the size stays within the band around that of the calm run; None if outside at the end."""
    ratio = np.asarray(sizes)[at + 1 :] / np.asarray(calm)[at + 1 :]
    outside = np.flatnonzero(~(np.abs(ratio - 1) <= BAND))
    if not outside.size:
        return 1
    return None if outside[-1] == ratio.size - 1 else int(outside[-1]) + 2


def _cell(steps: int | None, most: int) -> str:
    return f"> {most}" if steps is None else str(steps)


def tables() -> str:
    return f"{_theirs()}\n{_ours(EARLY)}\n{_ours(LATE)}"


def _theirs() -> str:
    lines = [
        "Steps until the RMS is first back (theirs), published values in brackets:\n",
        _row("", "spike at", *map(_power, SPIKES)),
        "|---" * (2 + len(SPIKES)) + "|",
    ]
    for name, make in rules().items():
        for at in (10, 50, 100) if (name, 10) in PUBLISHED else (EARLY,):
            theirs = PUBLISHED.get((name, at), (None,) * len(SPIKES))
            sizes = [rms(make, spike(scale, at), SHORT) for scale in SPIKES]
            steps = [_cell(recovery(each, at), SHORT - at - 1) for each in sizes]
            cells = [mine if told is None else f"{mine} ({told})" for mine, told in zip(steps, theirs, strict=True)]
            lines.append(_row(name, str(at), *cells))
    return "\n".join(lines) + "\n"


def _ours(at: int) -> str:
    names = [f"spike {_power(s)}" for s in SPIKES[1::2]] + [f"fall {_power(s)}" for s in FALLS]
    lines = [
        f"Steps after an event at step {at} until the RMS stays within 10 % of the same run without it (ours), and the "
        "smallest and largest ratio of the two from there on:\n",
        _row("", *names),
        "|---" * (1 + len(names)) + "|",
    ]
    for name, make in rules().items():
        events = [spike(1, at), *(spike(s, at) for s in SPIKES[1::2]), *(fall(s, at) for s in FALLS)]
        calm, *disturbed = (rms(make, event, at + LONG) for event in events)
        cells = []
        for sizes in disturbed:
            ratio = sizes[at:] / calm[at:]
            cells.append(f"{_cell(settled(sizes, calm, at), LONG - 1)} ({ratio.min():.2g}, {ratio.max():.2g})")
        lines.append(_row(name, *cells))
    return "\n".join(lines) + "\n"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _power(x: float) -> str:
    return f"{x:.0e}".replace("e+0", "e").replace("e-0", "e-")


SHOWN = {
    "AdamW 0.95": ("0.6", "-", 3.0),  # color, line, width: wide ones first, since some lie on each other
    "AdamW 0.999": ("black", "-", 1.3),
    "K-β, exact": ("tab:orange", "-", 1.3),
    "Stable-SPAM 0.95": ("tab:red", "-", 1.3),
    "AdaGC 0.95": ("tab:green", "--", 1.3),
}


def draw(picture: Path) -> None:
    """Update size over that of the same run without the event, 0 to 400 steps after it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    events = {
        "a spike: one gradient × 1,000": spike(1e3, LATE),
        "a fall: gradients × 0.01 from here on": fall(1e-2, LATE),
    }
    found = rules()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, (title, event) in zip(axes, events.items(), strict=True):
        axis.axhspan(1 - BAND, 1 + BAND, color="0.92", lw=0)
        for name, (color, line, width) in SHOWN.items():
            if name in found:
                calm, sizes = (rms(found[name], each, LATE + 400) for each in (spike(1, LATE), event))
                axis.plot(sizes[LATE:] / calm[LATE:], color=color, ls=line, lw=width, label=name)
        axis.set(title=title, xlabel="steps after it", yscale="log", xlim=(0, 400), ylim=(8e-3, 60))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("update RMS / without the event")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(picture, dpi=130)


def main(argv: Sequence[str]) -> int:
    torch.set_num_threads(1)
    match argv:
        case []:
            sys.stdout.write(tables())
        case ["--picture"]:
            draw(PICTURE)
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
