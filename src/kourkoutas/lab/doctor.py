"""What is installed here and works: frameworks, devices, threads, front ends, C kernels.

Each framework is tried in a process of its own, so that one that crashes on import is reported like one that is
missing, and thread pools of one do not change what another sees.

NOTE: nothing here needs the packages of the laboratory's extra; whether they are installed is one of the answers.
"""

from __future__ import annotations

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
SHORT_RUNS = (
    "runs of fewer than 2,000 steps: K-β's default starts at 13 % of your learning rate, and "
    'bias_correction="exact" at all of it'
)


def examine() -> dict[str, Any]:
    """Everything `kbeta doctor` prints."""
    command = [sys.executable, "-P", "-m", "kourkoutas.lab.doctor"]
    pipe = subprocess.PIPE
    started = {
        name: subprocess.Popen([*command, name], stdout=pipe, stderr=pipe, text=True)
        for name in FRONT_ENDS
        if _version(name) is not None
    }
    return {
        "kbeta": kourkoutas.__version__,
        **machine.environment(),
        "frameworks": {name: _answer(name, started.get(name)) for name in FRONT_ENDS},
        "kernels": _kernels(),
        "laboratory": {name: _version(name) for name in LAB},
    }


def probe(framework: str) -> dict[str, Any]:
    """Import one framework and its front ends, in this process."""
    module = importlib.import_module({"mlx": "mlx.core"}.get(framework, framework))
    found: dict[str, Any] = {
        "version": importlib.metadata.version(framework),
        "devices": _devices(framework, module),
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


def _devices(framework: str, module: Any) -> list[str]:
    if framework == "torch":
        cuda = [module.cuda.get_device_name(i) for i in range(module.cuda.device_count())]
        return ["cpu", *cuda, *(["mps"] if module.backends.mps.is_available() else [])]
    if framework == "jax":
        return [str(device) for device in module.devices()]
    return [str(module.Device(kind)) for kind in (module.cpu, module.gpu) if module.is_available(kind)]


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
    output, errors = process.communicate()
    if process.returncode != 0:
        reason = (errors.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return {"version": _version(name), "error": reason}
    answer: dict[str, Any] = json.loads(output.splitlines()[-1])
    return answer


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def text(found: dict[str, Any]) -> str:
    """What `examine` found, for people."""
    lines = [
        f"kbeta {found['kbeta']}, Python {found['python']}, {found['platform']}",
        f"{found['processor'] or found['machine']}, {found['cores']} cores",
        "",
    ]
    for name, one in found["frameworks"].items():
        told = [one["error"]] if "error" in one else [*one["devices"]]
        told += [f"{one['threads']} threads"] if "threads" in one else []
        told += [f"{front} {state}" for front, state in one.get("front_ends", {}).items()]
        lines.append(f"{name:5}  {one['version'] or '-'}  {', '.join(told)}")
    lines += ["", "C kernels: " + "; ".join(f"{name} {state}" for name, state in found["kernels"].items())]
    if route := found["frameworks"]["torch"].get("route"):
        lines.append(f"torch, a default step: {route}")
    if missing := [name for name, version in found["laboratory"].items() if version is None]:
        lines.append(f"the laboratory lacks {', '.join(missing)}: pip install 'kourkoutas-beta[lab]'")
    return "\n".join([*lines, SHORT_RUNS]) + "\n"


def main(arguments: Sequence[str]) -> None:
    """`kbeta doctor [--json]`."""
    found = examine()
    sys.stdout.write(json.dumps(found, indent=1) + "\n" if "--json" in arguments else text(found))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(sys.argv[1])) + "\n")
