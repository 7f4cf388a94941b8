"""What the compiler makes of the Triton kernels, for GPUs that are not here: all that options can ask for."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

triton = pytest.importorskip("triton")

from triton import language  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from benchmarks.operations import with_triton  # noqa: E402
from kourkoutas.torch import KourkoutasBeta, triton_kernels, triton_step  # noqa: E402

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FULL = {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}
THREADS = 128
POINTERS = {F32: "*fp32", F64: "*fp64", torch.int64: "*i64", torch.int32: "*i32"}


def produced():
    """Every kernel with its constants that some choice of dtypes and options makes the launcher ask for."""
    found = {}

    def launch(name, programs, *args, **constants):
        types = [argument_type(x) for x in args]
        # Under FakeTensorMode the numbers of blocks are held as int64.
        if name in ("measure", "update", "correct"):
            types[2] = "*i32"
        label = "-".join(str(x).removeprefix("torch.") for x in (name, *constants.values()))
        found[label] = name, tuple(types), tuple(constants.items())

    kinds = [(F32, None), (F64, None), (BF16, None), (F16, None), (torch.complex64, None)]
    kinds += [(BF16, F32), (F16, F32), (F32, BF16), (BF16, BF16), (F16, BF16)]
    extras = [{}, {"decay": 1.0}, {"adaptive_tiny": True}, FULL]
    patch = pytest.MonkeyPatch()
    with FakeTensorMode(), with_triton(), patch.context() as patched:
        patched.setattr(triton_step, "launch", launch)
        for dtype, state_dtype in kinds:
            for extra in extras:
                for rounding in (False, True):
                    if rounding and dtype is F16:
                        continue
                    options = {"state_dtype": state_dtype, "stochastic_rounding": rounding, "capturable": True, **extra}
                    p = torch.nn.Parameter(torch.empty(5, device="cuda", dtype=dtype))
                    p.grad = torch.empty_like(p)
                    KourkoutasBeta([p], **options).step()
    ints = ["i32", "i32", *["i64"] * triton_step.NOTES]
    found["note"] = "note", ("*i64", *ints), ()
    return found


def argument_type(x):
    if isinstance(x, torch.Tensor):
        return POINTERS[x.dtype]
    return "fp32" if isinstance(x, float) else "i32"


PRODUCED = produced()


@functools.cache
def compiled(label, target):
    name, types, constants = PRODUCED[label]
    kernel = getattr(triton_kernels, name)
    values = {}
    for constant, value in constants:
        is_dtype = isinstance(value, torch.dtype)
        values[constant] = getattr(language, str(value).removeprefix("torch.")) if is_dtype else value
    arguments = [a for a in kernel.arg_names if a not in values]
    signature = dict(zip(arguments, types, strict=True)) | dict.fromkeys(values, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    aligned = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = ASTSource(kernel, signature, values, {(i,): [["tt.divisibility", 16]] for i in aligned})
    warps = THREADS // TARGETS[target].warp_size
    return triton.compile(source, target=TARGETS[target], options={"num_warps": warps})


def label_of(name, **wanted):
    """The specialisation of a kernel that has these constants."""
    found = [
        label
        for label, (n, _, constants) in PRODUCED.items()
        if n == name and wanted.items() <= dict(constants).items()
    ]
    assert len(found) == 1, found
    return found[0]


DEFAULT = label_of("update", P=F32, S=F32, KEPT=False, MEAN=False)
FULL_UPDATE = label_of("update", P=F32, S=F32, KEPT=True, MEAN=True)
NORM = label_of("measure", P=F32, G=F32, MEAN=False)


def widths(assembly):
    """Bytes per thread of each load and store of tensors' elements in whole blocks, which are not predicated."""
    found = {"ld": [], "st": []}
    for line in assembly.splitlines():
        match = re.match(r"\s*(ld|st)\.global\.(?:v(\d)\.)?b(\d+)", line)
        if match:
            kind, count, bits = match.groups()
            found[kind].append(int(count or 1) * int(bits) // 8)
    return found


def usage(label, target):
    """Registers and bytes of spills, as the assembler reports them."""
    binary = compiled(label, target).asm
    if target == "gfx942":
        numbers = {
            key: int(n)
            for key, n in re.findall(r"\.(vgpr_count|vgpr_spill_count|sgpr_spill_count):\s*(\d+)", binary["amdgcn"])
        }
        return numbers["vgpr_count"], numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"]
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    arch = "sm_90a" if target == "sm_90" else target
    done = subprocess.run(
        [ptxas, "-v", f"-arch={arch}", "-o", "/dev/null", "/dev/stdin"],
        input=binary["ptx"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    return int(re.search(r"Used (\d+) registers", done.stderr)[1]), spills


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("label", PRODUCED)
def test_every_specialisation_compiles_and_nothing_spills(label, target):
    binary = compiled(label, target)
    assert binary.asm["hsaco" if target == "gfx942" else "cubin"]
    registers, spilled = usage(label, target)
    assert spilled == 0
    assert registers <= 168  # three blocks of 128 threads on a multiprocessor of 65,536 registers, at least


def test_the_options_produce_the_specialisations_that_the_documentation_counts():
    names = [name for name, _, _ in PRODUCED.values()]
    assert {name: names.count(name) for name in dict.fromkeys(names)} == {
        "measure": 8,
        "total": 2,
        "update": 24,
        "correct": 2,
        "note": 1,
    }


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("label", [label for label, (name, _, _) in PRODUCED.items() if name in ("update", "measure")])
def test_loads_and_stores_of_aligned_tensors_are_128_bits_wide(label, target):
    wide = widths(compiled(label, target).asm["ptx"])
    # What is narrower is the table's entries and the sums, one number each.
    tensors = [n for n in wide["ld"] + wide["st"] if n == 16]
    dtypes = dict(PRODUCED[label][2])
    elements = 1024 // THREADS
    bytes_of = {key: dtypes[key].itemsize * elements for key in ("P", "G", "S") if key in dtypes}
    if PRODUCED[label][0] == "measure":
        expected = bytes_of["G"] + (bytes_of["P"] if dtypes["MEAN"] else 0)
    else:
        expected = 2 * bytes_of["P"] + bytes_of["G"] + (6 if dtypes["KEPT"] else 4) * bytes_of["S"]
    assert 16 * len(tensors) == expected


def test_bytes_per_parameter_are_those_of_the_limit():
    def moved(label):
        found = widths(compiled(label, "sm_90").asm["ptx"])
        return sum(n for n in found["ld"] + found["st"] if n == 16) * THREADS / 1024

    assert moved(NORM) == 4
    assert moved(DEFAULT) == 28
    assert moved(FULL_UPDATE) + moved(NORM) == 40


def test_wide_loads_on_rocm_are_128_bits():
    text = compiled(DEFAULT, "gfx942").asm["amdgcn"]
    assert len(re.findall(r"(?:buffer|global)_load_dwordx4", text)) == 8
    assert len(re.findall(r"(?:buffer|global)_store_dwordx4", text)) == 6


def test_a_step_on_the_cpu_does_not_import_the_kernels():
    # torch.optim itself imports Triton, where it is installed.
    program = """
import sys, torch
from kourkoutas.torch import KourkoutasBeta
p = torch.nn.Parameter(torch.ones(3))
p.grad = torch.ones(3)
for options in ({}, {"foreach": True}, {"fused": False}):
    KourkoutasBeta([p], **options).step()
raise SystemExit("kourkoutas.torch.triton_kernels" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
