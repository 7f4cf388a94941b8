"""Does a small language model train the same with bfloat16 states? Held-out bits per character, paired by seed.

    python benchmarks/bf16_states.py [--text FILE] [--seeds 5] [--steps 2500] [--out FILE.json]

The laptop preset of char-lm with K-β's float32 moments, with bfloat16 moments rounded stochastically
(`state_dtype=torch.bfloat16`), and, to show what the rounding is for, with bfloat16 moments rounded to nearest.
Windows, initial weights and learning rates of a seed are the same for all three.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.judging.intervals import t_interval
from kourkoutas.torch import KourkoutasBeta


def trained(problem: Any, options: dict[str, Any], nearest: bool = False) -> float:
    """Held-out bits per character after the problem's steps."""
    E = engines.get("torch")
    params = {name: torch.tensor(p, requires_grad=True) for name, p in problem.params.items()}
    optimizer = KourkoutasBeta(params.items(), **options)
    leaves = list(params.values())
    for start in range(0, problem.steps, 100):
        stop = min(start + 100, problem.steps)
        rates = problem.lr(np.arange(start, stop))
        for batch, lr in zip(problem.batches(start, stop), rates, strict=True):
            loss = problem.loss(E, params, {name: E.array(x) for name, x in batch.items()})
            for p, g in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
                p.grad = g
            optimizer.param_groups[0]["lr"] = float(lr)
            optimizer.step()
            for p in leaves if nearest else ():
                for name in ("exp_avg", "exp_avg_sq"):
                    moment = optimizer.state[p][name]
                    moment.copy_(moment.bfloat16())
    return float(problem.evaluate(E, {name: p.detach() for name, p in params.items()}, problem.steps)["bpc"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", help="a UTF-8 file; without it the built-in generated corpus")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    testbed = testbeds.get("char_lm")
    changes = {name: value for name, value in (("text", args.text), ("steps", args.steps)) if value is not None}
    settings = testbeds.settings_of(testbed, "laptop", changes)
    arms: dict[str, dict[str, Any]] = {
        "float32": {"options": {**testbed.kbeta}},
        "bfloat16": {"options": {**testbed.kbeta, "state_dtype": torch.bfloat16}},
        "bfloat16, to nearest": {"options": {**testbed.kbeta}, "nearest": True},
    }
    found: dict[str, dict[int, float]] = {name: {} for name in arms}
    for seed in range(args.seeds):
        problem = testbed.problem(settings, seed)
        for name, arm in arms.items():
            found[name][seed] = trained(problem, **arm)
            print(f"seed {seed}, {name}: {found[name][seed]:.4f} bits per character", flush=True)
    first = np.array([found["float32"][s] for s in range(args.seeds)])
    record: dict[str, Any] = {"steps": settings.steps, "bpc": found, "difference": {}}
    for name in list(arms)[1:]:
        d = np.array([found[name][s] for s in range(args.seeds)]) - first
        ci = t_interval(d)
        record["difference"][name] = {"mean": float(d.mean()), "ci": [ci.low, ci.high]}
        print(f"{name} - float32: {d.mean():+.4f} [{ci.low:+.4f}, {ci.high:+.4f}] bits per character")
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
