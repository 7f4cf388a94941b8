"""The C kernels under the sanitizers of GCC: `python release/sanitize.py` (or `make test-sanitize`).

| pass             | finds                                              | threads                    |
|------------------|----------------------------------------------------|----------------------------|
| address, undefined | reads and writes out of bounds, undefined arithmetic | the framework's pool    |
| thread           | data races                                         | the kernels' own           |

Each pass compiles the kernels into a copy of the package under build/, preloads the sanitizer's library into a Python
that is not instrumented, and runs the kernels' own tests. Any report fails the pass.

NOTE: libstdc++ is preloaded too: the sanitizer must find it to let torch's own exceptions through.

NOTE: the thread pass turns the OpenMP pool off: its hand-overs are not instrumented and would all look like races.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TESTS = (
    "tests/torch_frontend/test_kernel.py",
    "tests/torch_frontend/test_eigenbasis.py",
    "tests/torch_frontend/test_conformance.py",
    "tests/torch_frontend/test_layouts.py",
    "tests/torch_frontend/test_state_dtype.py",
    "tests/torch_frontend/test_stochastic_rounding.py",
    "tests/torch_frontend/test_strange_use.py",
    "tests/lab/testbeds/test_heat3d_native.py",
)
KERNELS = runpy.run_path(str(ROOT / "setup.py"))["KERNELS"]


class Pass(NamedTuple):
    flags: str
    library: str
    environment: dict[str, str]


PASSES = {
    "address-undefined": Pass(
        "address,undefined",
        "libasan.so",
        {
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:halt_on_error=1",  # Python itself never frees some memory
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
        },
    ),
    "thread": Pass(
        "thread", "libtsan.so", {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66:ignore_noninstrumented_modules=1"}
    ),
}


def build(name: str, flags: str) -> Path:
    """A copy of the package with instrumented kernels."""
    to = ROOT / "build" / f"sanitize-{name}"
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(ROOT / "src", to, ignore=shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info"))
    native = to / "kourkoutas" / "_native"
    if "thread" in flags:
        header = native / "threads.h"
        text = header.read_text(encoding="utf-8")
        changed = text.replace("!wanted ? NULL", "!wanted || 1 ? NULL")
        if changed == text:
            raise SystemExit("threads.h no longer looks for OpenMP as this script expects")
        header.write_text(changed, encoding="utf-8")
    for kernel in KERNELS:
        sources = [str(to / Path(source).relative_to("src")) for source in kernel.sources]
        macros = [f"-D{name}={value}" for name, value in kernel.define_macros]
        library = native / f"{kernel.name.rpartition('.')[2]}.abi3.so"
        command = [
            "gcc", *kernel.extra_compile_args, "-O1", "-g", "-fno-omit-frame-pointer",
            f"-fsanitize={flags}", "-fno-sanitize-recover=all", "-shared", "-fPIC", *macros,
            f"-I{sysconfig.get_paths()['include']}", *sources, "-o", str(library), "-lm", "-ldl",
        ]  # fmt: skip
        subprocess.run(command, check=True)
    return to


def library(name: str) -> str:
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    if not Path(found).is_absolute():
        raise SystemExit(f"gcc has no {name}: install its sanitizer libraries")
    return found


def main() -> None:
    for name in sys.argv[1:] or PASSES:
        one = PASSES[name]
        to = build(name, one.flags)
        preloaded = f"{library(one.library)}:{library('libstdc++.so.6')}"
        environment = {
            **os.environ, **one.environment, "PYTHONPATH": str(to), "LD_PRELOAD": preloaded,
            "PYTHONMALLOC": "malloc", "OMP_NUM_THREADS": "2", "KBETA_SANITIZED": name,
        }  # fmt: skip
        check = (
            "import kourkoutas._native as n, sys; "
            f"sys.exit(0 if all(k and {str(to)!r} in k.__file__ for k in (n.step, n.taylor)) else 'not loaded')"
        )
        subprocess.run([sys.executable, "-c", check], check=True, env=environment)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "-s", *TESTS]
        subprocess.run([*command, "-k", "kernel or native"], check=True, env=environment, cwd=ROOT, timeout=1500)
        print(f"{name}: no report")


if __name__ == "__main__":
    main()
