"""Step time of each signal against K-β's default, in PyTorch: alternated as in `kbeta bench`.

    python benchmarks/signal_step.py [SHAPE ...]      pinn, charlm and big unless named

Signals are timed as they are meant, with bias_correction="exact", and by themselves. "default again" is the default
once more, in an optimizer of its own: how far its ratio is from 1 is what the measurement cannot tell.
"""

import os
import sys

from kourkoutas.bench import torch as bench
from kourkoutas.bench.shapes import SHAPES, count
from kourkoutas.bench.timing import compare
from kourkoutas.torch import KourkoutasBeta

BASE = "default"
OPTIONS = {
    BASE: {},
    "default again": {},
    "exact": {"bias_correction": "exact"},
    "centred": {"signal": "centred"},
    "predictive": {"signal": "predictive"},
    "centred, exact": {"signal": "centred", "bias_correction": "exact"},
    "predictive, exact": {"signal": "predictive", "bias_correction": "exact"},
}


def main(shapes: list[str]) -> None:
    print(f"torch {bench.VERSION}, {len(os.sched_getaffinity(0))} threads; median ratio to the default [quartiles]")
    bench.torch.set_num_threads(len(os.sched_getaffinity(0)))
    for shape in shapes:
        names = [(f"p{i}", p) for i, p in enumerate(bench.tensors(SHAPES[shape]))]
        made = {name: bench.contestant(KourkoutasBeta(names, **own), BASE) for name, own in OPTIONS.items()}
        for row in compare(made, count(shape), rounds=41, seconds=60):
            low, high = row["ratio_quartiles"]
            print(
                f"{shape:8}{row['contestant']:20}{row['seconds'] * 1e6:10.1f} µs"
                f"{row['ratio']:8.3f} [{low:.3f}, {high:.3f}]",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:] or ["pinn", "charlm", "big"])
