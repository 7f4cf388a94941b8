"""What is installed here and works: frameworks, devices, threads, front ends, C kernels.

Each framework is tried in a process of its own, so that one that crashes on import is reported like one that is
missing, and thread pools of one do not change what another sees.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from typing import Any

import kourkoutas
from kourkoutas import _native
from kourkoutas.lab import store

FRONT_ENDS = {
    "torch": ("kourkoutas.torch",),
    "jax": ("kourkoutas.optax",),
    "mlx": ("kourkoutas.mlx", "kourkoutas.paper"),
}
LAB = ("scipy", "statsmodels", "matplotlib", "rich", "typer", "pydantic", "jinja2")
OPTIONAL = ("triton", "pytorch_optimizer", "tensorboard", "wandb", "ray")
SECONDS = 120


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
    }
    return {
        "kbeta": kourkoutas.__version__,
        **store.environment(),
        "memory_gib": _memory(),
        "frameworks": {name: _answer(name, process) for name, process in started.items()},
        "kernels": _kernels(),
        "laboratory": _versions(LAB),
        "optional": _versions(OPTIONAL),
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


def _kernels() -> dict[str, str | None]:
    """The C kernels, None where one was not built or is turned off."""
    return {
        "step": None if _native.step is None else "built",
        "taylor": None if _native.taylor is None else f"built, for {_native.taylor.VARIANTS[0]}",
    }


def _answer(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    if _version(name) is None:
        process.kill()
        process.communicate()
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


def _versions(packages: tuple[str, ...]) -> dict[str, str | None]:
    return {name: _version(name) for name in packages}


def _memory() -> float | None:
    import os

    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe(sys.argv[1])) + "\n")
