"""The optional C kernels and the description for the package index; everything else is in pyproject.toml."""

import re
import sys
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

NATIVE = "src/kourkoutas/_native"


def kernel(name: str, sources: list[str], headers: list[str], *flags: str) -> Extension:
    # NOTE: no -ffast-math, which would turn on flush-to-zero in the whole process. Without errno the square root is one
    # instruction. Names that the sources of a kernel share stay inside it (-fvisibility=hidden).
    return Extension(
        f"kourkoutas._native._{name}",
        [f"{NATIVE}/{source}" for source in sources],
        depends=[f"{NATIVE}/{header}" for header in headers],
        extra_compile_args=["-std=gnu11", "-O3", "-Wall", "-Wextra", "-fno-math-errno", "-fvisibility=hidden", *flags],
        libraries=["m", "dl"] if sys.platform.startswith("linux") else [],
        define_macros=[("Py_LIMITED_API", "0x030b0000")],
        py_limited_api=True,
        optional=True,
    )


KERNELS = [
    # The optimizer's step: without contraction, so that all CPUs give the same bits.
    kernel(
        "step",
        ["step.c", "arithmetic.c", "bases.c"],
        ["tensors.h", "arithmetic.h", "formats.h", "threads.h", "bases.h"],
        "-ffp-contract=off",
    ),
    # The loss of the laboratory's Testbed B, which lives from fused multiply-add.
    kernel("taylor", ["taylor.c"], ["threads.h", "taylor_block.h"], "-ffp-contract=fast"),
]


class StableABIWheel(bdist_wheel):
    """One wheel for every Python from 3.11 on."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp311"
        super().finalize_options()


class Compiled(Distribution):
    """Makes a wheel for one platform also where there is no kernel: cibuildwheel refuses any other."""

    def has_ext_modules(self) -> bool:
        return True


HOME = "https://github.com/kourkoutas-beta/kourkoutas-beta/blob/main/"
RAW = "https://raw.githubusercontent.com/kourkoutas-beta/kourkoutas-beta/main/"


def for_the_index(readme: str) -> str:
    """README with absolute links. In a clone they are relative; a package index has no files beside the page."""
    readme = re.sub(r"\]\((?![a-z]+:|#)", f"]({HOME}", readme)
    return re.sub(r'\b(src|srcset)="(?![a-z]+:)', rf'\1="{RAW}', readme)


if __name__ == "__main__":
    setup(
        long_description=for_the_index((Path(__file__).parent / "README.md").read_text(encoding="utf-8")),
        long_description_content_type="text/markdown",
        ext_modules=[] if sys.platform == "win32" else KERNELS,  # they use POSIX threads and dlsym
        distclass=Compiled,
        cmdclass={"bdist_wheel": StableABIWheel},
    )
