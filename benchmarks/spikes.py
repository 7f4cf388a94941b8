"""Recovery from a gradient spike, and from a fall: the set-up of NVIDIA's Emerging-Optimizers, with more optimizers.

    python benchmarks/spikes.py             the tables, as Markdown
    python benchmarks/spikes.py --curves    docs/pictures/spikes.csv, from which `make pictures` draws

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

import csv
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kourkoutas.torch import KourkoutasBeta

CURVES = Path(__file__).parents[1] / "docs" / "pictures" / "spikes.csv"
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


DRAWN = ("K-β", "AdamW 0.95", "AdamW 0.999", "Stable-SPAM 0.95", "AdaGC 0.95")
BEFORE, AFTER = 30, 400  # steps around the event


def keep_curves(file: Path) -> None:
    """Gradient norms, over their usual size, and update sizes, over those of the same run without the event."""
    events = {"spike": spike(1e3, LATE), "fall": fall(1e-2, LATE)}
    found, first, last = rules(), LATE - BEFORE, LATE + AFTER
    if missing := [name for name in DRAWN if name not in found]:
        raise SystemExit(f"the curves need {', '.join(missing)}: pip install pytorch-optimizer==4.1.0")
    norms = _gradients(LATE + LONG).flatten(1).norm(dim=1).numpy()
    usual = norms[:LATE].mean()
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["event", "step", "norm", *DRAWN])
        for title, event in events.items():
            ratios = []
            for name in DRAWN:
                calm, sizes = (rms(found[name], each, last) for each in (spike(1, LATE), event))
                ratios.append(sizes / calm)
            for k in range(first, last):
                values = [event(k) * norms[k] / usual, *(ratio[k] for ratio in ratios)]
                writer.writerow([title, k - LATE, *(f"{value:.4g}" for value in values)])


def main(argv: Sequence[str]) -> int:
    torch.set_num_threads(1)
    match argv:
        case []:
            sys.stdout.write(tables())
        case ["--curves"]:
            keep_curves(CURVES)
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
