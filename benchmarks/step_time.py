"""Step time and memory of Kourkoutas-β against each framework's Adam.

    python benchmarks/step_time.py                        every installed framework, all shapes: `make bench`
    python benchmarks/step_time.py --framework torch --shape pinn --json
    python benchmarks/step_time.py --device cuda          PyTorch on a GPU

With KBETA_PEER_PYTHON=<an interpreter that has a peer>, the peer is timed in the same rounds.

Each framework and shape is timed in a process of its own. Contestants take turns, round after round, and each round
gives the ratio of a contestant to its baseline; the median over rounds is what is reported. The figures are worth what
the machine was worth: on a busy one only the ratios mean something, and even they spread.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from contestants import SHAPES, contestants, count
from peer import Peer
from timing import Contestant, compare

FRAMEWORKS = {"torch": ("torch",), "jax": ("jax", "optax"), "mlx": ("mlx",)}
SKIPPED = {
    ("mlx", "tiny"): "on one small tensor MLX's time is that of its dispatch, not of the step",
    ("mlx", "big"): "MLX's CPU back end takes too long for it",
}
WORKER = (sys.executable, __file__, "--worker")
NO_KERNEL = {
    "cpu": ("torch, K-β through its C kernel", "the kernel is not in use; `kbeta doctor` says why"),
    "cuda": ("torch, K-β through its Triton kernels", "they are not in use; `optimizer.route()` says why"),
}


def installed() -> list[str]:
    """The frameworks that can be timed here."""
    return [name for name, needs in FRAMEWORKS.items() if all(importlib.util.find_spec(n) for n in needs)]


def measure(framework: str, shape: str, threads: int, rounds: int, seconds: float, device: str) -> dict[str, Any]:
    """Time one framework on one shape, in this process; PyTorch beside a peer, if there is one."""
    everyone = contestants(framework, SHAPES[shape], threads, device)
    python = os.environ.get("KBETA_PEER_PYTHON") if framework == "torch" and device == "cpu" else None
    peer = Peer(python, SHAPES[shape], threads) if python else None
    try:
        if peer is not None:
            everyone[peer.name] = Contestant(peer.steps, "K-β", peer.state_bytes, elsewhere=True)
        rows = compare(everyone, count(shape), rounds, seconds)
    finally:
        if peer is not None:
            peer.close()
    version = importlib.metadata.version(framework)
    rows = [{"framework": framework, "shape": shape, **row} for row in rows]
    return {"version": version, "machine": _gpu() if device == "cuda" else {}, "rows": rows}


def _gpu() -> dict[str, str]:
    """What a reader must know of the GPU, its driver's CUDA or ROCm, and Triton."""
    import torch

    triton = importlib.metadata.version("triton") if importlib.util.find_spec("triton") else "not installed"
    platform = f"CUDA {torch.version.cuda}" if torch.version.hip is None else f"ROCm {torch.version.hip}"
    return {"gpu": torch.cuda.get_device_name(), "platform": platform, "triton": triton}


def run(
    frameworks: Sequence[str] | None = None,
    shapes: Sequence[str] = tuple(SHAPES),
    *,
    threads: int | None = None,
    rounds: int = 15,
    seconds: float = 10.0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Time everything asked for, each framework and shape in a process of its own.

    Args:
      frameworks: of "torch", "jax", "mlx"; None for those installed.
      shapes: of `SHAPES`.
      threads: for PyTorch; None for the cores of this process.
      rounds: at most this many per shape.
      seconds: no new round after this long per shape, once there are three.
      device: "cpu", or "cuda" for PyTorch on a GPU.

    Returns:
      {"machine": …, "versions": …, "rows": [{"framework", "shape", "contestant", "baseline", "seconds", "ratio", …}],
      "skipped": [{"what", "why"}]}.
    """
    for name, value in (("rounds", rounds), ("threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"`{name}` must be at least 1; got {value}")
    if not seconds >= 0:
        raise ValueError(f"`seconds` must be a time >= 0; got {seconds}")
    threads = threads or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    if device != "cpu":
        frameworks = _on_gpu(frameworks)
    result: dict[str, Any] = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": threads,
            "load": _load(),
            "device": device,
        },
        "versions": {},
        "rows": [],
        "skipped": [],
    }
    here = installed()
    for framework in frameworks or FRAMEWORKS:
        if framework not in here:
            why = f"not installed: pip install 'kourkoutas-beta[{framework}]'"
            if frameworks is not None:
                raise ValueError(f"`framework` {framework!r} is {why}")
            result["skipped"].append({"what": framework, "why": why})
            continue
        for shape in shapes:
            if (framework, shape) in SKIPPED:
                result["skipped"].append({"what": f"{framework} {shape}", "why": SKIPPED[framework, shape]})
                continue
            options = [framework, shape, str(threads), str(rounds), str(seconds), device]
            done = subprocess.run([*WORKER, *options], capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"timing {framework} on {shape} failed:\n{done.stderr}")
            part = json.loads(done.stdout.splitlines()[-1])
            result["versions"][framework] = part["version"]
            result["machine"] |= part["machine"]
            result["rows"] += part["rows"]
        timed = {row["contestant"] for row in result["rows"] if row["framework"] == framework}
        if framework == "torch" and "K-β" not in timed:
            what, why = NO_KERNEL[device]
            result["skipped"].append({"what": what, "why": why})
    return result


def _on_gpu(frameworks: Sequence[str] | None) -> Sequence[str]:
    """The frameworks that are timed on a GPU: PyTorch, if it finds one."""
    import torch

    if frameworks not in (None, ["torch"]):
        raise ValueError(f"`device` 'cuda' is for torch only; got {frameworks!r}: leave the other frameworks out")
    if not torch.cuda.is_available():
        raise ValueError("`device` is 'cuda', but torch finds no GPU: see torch.cuda.is_available()")
    return ["torch"]


def _load() -> float | None:
    """How busy the machine was before the run: waiting processes per core."""
    return os.getloadavg()[0] / (os.cpu_count() or 1) if hasattr(os, "getloadavg") else None


def table(result: dict[str, Any]) -> str:
    """The ratios as text."""
    lines = []
    for framework in dict.fromkeys(r["framework"] for r in result["rows"]):
        rows = [r for r in result["rows"] if r["framework"] == framework]
        shapes = list(dict.fromkeys(r["shape"] for r in rows))
        lines.append(f"{framework} {result['versions'][framework]}: time per step, ratio to the baseline")
        lines.append(f"{'':44}" + "".join(f"{s:>10}" for s in shapes))
        for name in dict.fromkeys(r["contestant"] for r in rows):
            mine = {r["shape"]: r for r in rows if r["contestant"] == name}
            base = next(iter(mine.values()))["baseline"]
            title = f"{name} / {base}" if name != base else f"{name}, µs"
            cells = [f"{mine[s]['seconds'] * 1e6:10.0f}" if name == base else f"{mine[s]['ratio']:10.2f}" for s in mine]
            lines.append(f"{title:44}" + "".join(cells))
        lines.append("")
    lines += [f"skipped {one['what']}: {one['why']}" for one in result["skipped"]]
    return "\n".join([*lines, ""])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Time K-β against each framework's Adam.")
    parser.add_argument("--framework", action="append", choices=FRAMEWORKS, help="repeat for several; default: all")
    parser.add_argument("--shape", action="append", choices=SHAPES, help="repeat for several; default: all")
    parser.add_argument("--threads", type=int, help="for PyTorch; default: the cores of this process")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where PyTorch steps")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=10.0, help="budget per framework and shape")
    parser.add_argument("--out", type=Path, default=Path("results/bench"), help="folder for bench.json")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(argv)
    how = {name: getattr(options, name) for name in ("threads", "rounds", "seconds", "device")}
    try:
        result = run(options.framework, options.shape or tuple(SHAPES), **how)
    except ValueError as error:
        parser.error(re.sub("`(threads|rounds|seconds|device)`", r"--\1", str(error)))
    sys.stdout.write(json.dumps(result, indent=1) + "\n" if options.json else table(result))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "bench.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        framework, shape, threads, rounds, seconds, device = sys.argv[2:]
        found = measure(framework, shape, int(threads), int(rounds), float(seconds), device)
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.exit(main(sys.argv[1:]))
