"""A peer in an interpreter of its own, stepped from here by lines over a pipe.

As a script it runs under the peer's interpreter, which needs torch and the peer but not this package: it reads one JSON
line with the shapes, then one line per sample with the number of steps, and answers each with the seconds.
"""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
import sys
import time
from typing import Any

MODULES = ("adv_optm",)
SWITCHES = ("kourkoutas_beta", "use_kourkoutas")


def _optimizer(params: list[Any]) -> tuple[str, Any]:
    """The first AdamW of the peer that has a switch for Kourkoutas-β in its signature."""
    for module in MODULES:
        package = importlib.import_module(module)
        for name in sorted(vars(package), key=lambda n: (not n.startswith("Adam"), n)):
            kind: Any = getattr(package, name)
            options = inspect.signature(kind).parameters if inspect.isclass(kind) else {}
            switches = [option for option in options if option in SWITCHES]
            if switches:
                return f"{module} {name}", kind(params, lr=1e-3, **{switches[0]: True})
    raise SystemExit(f"none of {', '.join(MODULES)} has a Kourkoutas-β option here")


def _serve() -> None:
    import torch

    order = json.loads(sys.stdin.readline())
    torch.set_num_threads(order["threads"])
    params = [torch.nn.Parameter(0.1 * torch.randn(shape)) for shape in order["shapes"]]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    name, optimizer = _optimizer(params)
    optimizer.step()
    size = sum(x.numel() * x.element_size() for s in optimizer.state.values() for x in s.values() if torch.is_tensor(x))
    sys.stdout.write(json.dumps({"name": name, "state_bytes": size}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            optimizer.step()
        sys.stdout.write(f"{time.perf_counter() - start}\n")
        sys.stdout.flush()


class Peer:
    """The peer's process, seen from here."""

    def __init__(self, python: str, shapes: list[tuple[int, ...]], threads: int) -> None:
        self._process = subprocess.Popen(
            [python, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._send(json.dumps({"shapes": shapes, "threads": threads}))
        hello = json.loads(self._receive())
        self.name: str = hello["name"]
        self.state_bytes: int = hello["state_bytes"]

    def _send(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _receive(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError("the peer's process ended: run its interpreter by hand to see why")
        return line

    def steps(self, k: int) -> float:
        self._send(str(k))
        seconds = float(self._receive())
        # Its OpenMP workers spin on for a while after a step, on the cores of whoever is next.
        time.sleep(0.1)
        return seconds

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._process.wait(timeout=60)


if __name__ == "__main__":
    _serve()
