"""The optional C kernel; everything else about the build is in pyproject.toml."""

import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

# NOTE: no -ffast-math, which would turn on flush-to-zero in the whole process. Contraction is off so that all CPUs give
# the same bits; without errno the square root is one instruction.
KERNEL = Extension(
    "kbeta._native._step",
    ["src/kbeta/_native/step.c"],
    extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno"],
    libraries=["m", "dl"] if sys.platform.startswith("linux") else [],
    define_macros=[("Py_LIMITED_API", "0x030b0000")],
    py_limited_api=True,
    optional=True,
)


class StableABIWheel(bdist_wheel):
    """One wheel for every Python from 3.11 on."""

    def finalize_options(self) -> None:
        self.py_limited_api = "cp311"
        super().finalize_options()


# The kernel uses POSIX threads and dlsym.
setup(ext_modules=[] if sys.platform == "win32" else [KERNEL], cmdclass={"bdist_wheel": StableABIWheel})
