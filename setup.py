"""The optional C kernels; everything else about the build is in pyproject.toml."""

import sys

from setuptools import Distribution, Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel


def kernel(name: str, depends: list[str], *flags: str) -> Extension:
    # NOTE: no -ffast-math, which would turn on flush-to-zero in the whole process. Without errno the square root is one
    # instruction.
    return Extension(
        f"kourkoutas._native._{name}",
        [f"src/kourkoutas/_native/{name}.c"],
        depends=[f"src/kourkoutas/_native/{header}" for header in depends],
        extra_compile_args=["-std=gnu11", "-O3", "-fno-math-errno", *flags],
        libraries=["m", "dl"] if sys.platform.startswith("linux") else [],
        define_macros=[("Py_LIMITED_API", "0x030b0000")],
        py_limited_api=True,
        optional=True,
    )


KERNELS = [
    # The optimizer's step: without contraction, so that all CPUs give the same bits.
    kernel("step", ["threads.h", "formats.h"], "-ffp-contract=off"),
    # The loss of the laboratory's Testbed B, which lives from fused multiply-add.
    kernel("taylor", ["threads.h", "taylor_block.h"], "-ffp-contract=fast"),
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


# The kernels use POSIX threads and dlsym.
setup(
    ext_modules=[] if sys.platform == "win32" else KERNELS,
    distclass=Compiled,
    cmdclass={"bdist_wheel": StableABIWheel},
)
