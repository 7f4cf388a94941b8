"""What is installed here and works: frameworks, devices, threads, front ends, C kernels.

Each framework is tried in a process of its own, so that one that crashes on import is reported like one that is
missing, and thread pools of one do not change what another sees.

NOTE: nothing here needs the packages of the laboratory's extra; whether they are installed is one of the answers.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import kourkoutas
from kourkoutas import _native
from kourkoutas.lab import machine

FRONT_ENDS = {
    "torch": ("kourkoutas.torch",),
    "jax": ("kourkoutas.optax",),
    "mlx": ("kourkoutas.mlx", "kourkoutas.paper"),
}
LAB = ("scipy", "pandas", "matplotlib", "rich", "typer", "pydantic", "jinja2", "cloudpickle", "psutil", "platformdirs")
OPTIONAL = ("pytorch_optimizer", "tensorboard", "wandb", "ray")
SECONDS = 120
SHORT_RUNS = (
    "runs of fewer than 2,000 steps: K-β's default starts at 13 % of your learning rate, and "
    'bias_correction="exact" at all of it'
)


def examine() -> dict[str, Any]:
    """Everything `kbeta doctor` prints."""
    started = {
        name: subprocess.Popen(
            [sys.executable, "-P", "-m", "kourkoutas.lab.doctor", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in FRONT_ENDS
        if _version(name) is not None
    }
    return {
        "kbeta": kourkoutas.__version__,
        **machine.environment(),
        "memory_gib": machine.memory_gib(),
        "frameworks": {name: _answer(name, started.get(name)) for name in FRONT_ENDS},
        "kernels": _kernels(),
        "laboratory": {name: _version(name) for name in LAB},
        "optional": {name: _version(name) for name in OPTIONAL},
    }


def probe(framework: str) -> dict[str, Any]:
    """Import one framework and its front ends, in this process."""
    module = importlib.import_module({"mlx": "mlx.core"}.get(framework, framework))
    found: dict[str, Any] = {
        "version": importlib.metadata.version(framework),
        "devices": _DEVICES[framework](module),
        "front_ends": {},
    }
    if framework == "torch":
        found["threads"] = module.get_num_threads()
    for name in FRONT_ENDS[framework]:
        try:
            importlib.import_module(name)
            found["front_ends"][name] = "ok"
        except Exception as error:
            found["front_ends"][name] = f"{type(error).__name__}: {error}"
    if found["front_ends"].get("kourkoutas.torch") == "ok":
        found["route"] = _torch_route(module)
    return found


def _torch_route(torch: Any) -> str:
    """Which way a default step on the CPU goes, and why."""
    from kourkoutas.torch import KourkoutasBeta

    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    (route,) = KourkoutasBeta([parameter]).route()
    return f"{route.name}: {route.reason}"


def _kernels() -> dict[str, str]:
    """What became of each C kernel."""
    found = {}
    for name, module in (("step", _native.step), ("taylor", _native.taylor)):
        if module is not None:
            found[name] = "built" if name == "step" else f"built, for {module.VARIANTS[0]}"
        elif importlib.util.find_spec(f"kourkoutas._native._{name}") is None:
            found[name] = "not built"
        elif os.environ.get("KBETA_NATIVE", "1") == "0":
            found[name] = "turned off by KBETA_NATIVE=0"
        else:
            try:
                importlib.import_module(f"kourkoutas._native._{name}")
            except ImportError as error:
                found[name] = f"built, but it does not load: {error}"
    return found


def _answer(name: str, process: subprocess.Popen[str] | None) -> dict[str, Any]:
    if process is None:
        return {"version": None, "error": f"not installed: pip install 'kourkoutas-beta[{name}]'"}
    try:
        output, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"version": _version(name), "error": f"importing it took more than {SECONDS} s"}
    if process.returncode != 0:
        reason = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return {"version": _version(name), "error": reason}
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def _torch_devices(torch: Any) -> list[str]:
    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *(["mps"] if torch.backends.mps.is_available() else [])]


def _mlx_devices(mx: Any) -> list[str]:
    return [str(mx.Device(kind)) for kind in (mx.cpu, mx.gpu) if mx.is_available(kind)]


_DEVICES = {
    "torch": _torch_devices,
    "jax": lambda jax: [str(device) for device in jax.devices()],
    "mlx": _mlx_devices,
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def text(found: dict[str, Any]) -> str:
    """What `examine` found, for people."""
    rows = [("framework", "version", "devices, threads, front ends")]
    for name, one in found["frameworks"].items():
        if "error" in one:
            rows.append((name, one["version"] or "-", one["error"]))
            continue
        threads = [f"{one['threads']} threads"] if "threads" in one else []
        fronts = [f"{front} {state}" for front, state in one["front_ends"].items()]
        rows.append((name, one["version"], ", ".join([*one["devices"], *threads, *fronts])))
    first, second = (max(len(row[k]) for row in rows) for k in (0, 1))
    memory = f", {found['memory_gib']} GiB" if found["memory_gib"] else ""
    lines = [
        f"kbeta {found['kbeta']}, Python {found['python']}, {found['platform']}",
        f"{found['processor'] or found['machine']}, {found['cores']} cores{memory}",
        "",
        *(f"{row[0]:{first}}  {row[1]:{second}}  {row[2]}" for row in rows),
        "",
        "C kernels: " + "; ".join(f"{name} {state}" for name, state in found["kernels"].items()),
    ]
    if route := found["frameworks"]["torch"].get("route"):
        lines.append(f"torch, a default step: {route}")
    for title in ("laboratory", "optional"):
        packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in found[title].items())
        lines.append(f"{title}: {packages}")
    if not all(found["laboratory"].values()):
        lines.append("the laboratory needs its extra: pip install 'kourkoutas-beta[lab]'")
    lines.append(SHORT_RUNS)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """`kbeta doctor` where the laboratory's packages are missing."""
    parser = argparse.ArgumentParser(prog="kbeta doctor", description="Show what is installed and works here.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    found = examine()
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if options.json else text(found))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(sys.argv[1])) + "\n")
