"""The native kernel: where it runs, and what it promises beyond the conformance table."""

import os
import runpy
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kourkoutas import Hyper, _native
from kourkoutas.oracle import Oracle
from kourkoutas.torch import KourkoutasBeta, kernel, options

ROOT = Path(__file__).parents[2]
FULL = {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}
SIZES = [(3,), (130, 257), (), (8192,), (20000,), (1,), (0, 4)]

needs_kernel = pytest.mark.skipif(kernel.extension is None, reason="the native kernel was not built")


class Counting:
    """The C kernel, with its finished steps counted."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.steps = 0

    def __getattr__(self, name):
        return getattr(self.kernel, name)

    def apply(self, *args):
        self.steps += 1
        return self.kernel.apply(*args)


@pytest.fixture
def counted(monkeypatch):
    counting = Counting(kernel.extension)
    monkeypatch.setattr(kernel, "extension", counting)
    return counting


@pytest.fixture
def restored():
    yield
    kernel.connect()


def parameters(sizes=SIZES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]


def set_grads(params, t):
    generator = torch.Generator().manual_seed(100 + t)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) * (30.0 if t == 3 else 1.0)


def run(params, steps=5, between=lambda t, params, optimizer: None, **options):
    optimizer = KourkoutasBeta(params, lr=1e-2, **options)
    for t in range(steps):
        set_grads(params, t)
        optimizer.step()
        between(t, params, optimizer)
    return optimizer


def everything(params, optimizer):
    return [x.detach().clone() for p in params for x in (p, *optimizer.state[p].values())]


def assert_same_bits(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@needs_kernel
@pytest.mark.parametrize("options", [{}, FULL, {"buckets": "global", "weight_decay": 0.1}, {"nonfinite": "raise"}])
def test_every_step_runs_natively_by_default(counted, options):
    run(parameters(), steps=3, **options)
    assert counted.steps == 3


@pytest.mark.parametrize(
    "options",
    [{"fused": False}, {"foreach": True}, {"capturable": True}],
    ids=["plain", "foreach", "capturable"],
)
@needs_kernel
def test_other_routes_do_not_touch_the_kernel(counted, options):
    run(parameters(), steps=2, **options)
    assert counted.steps == 0


@needs_kernel
@pytest.mark.parametrize("options", [{}, FULL, {"buckets": "shape"}, {"buckets": "global", **FULL}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_number_of_threads_changes_no_bit(options, dtype, restored):
    before = torch.get_num_threads()
    results = []
    try:
        for threads, openmp in ((1, True), (2, True), (3, True), (5, False)):
            kernel.connect(openmp=openmp)
            torch.set_num_threads(threads)
            params = parameters([*SIZES, (300, 301)], dtype)
            results.append(everything(params, run(params, steps=3, **options)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert_same_bits(results[0], other)


@needs_kernel
@pytest.mark.parametrize("edit", ["in place", "p.data", "replaced", "numpy", "one element"])
def test_a_parameter_changed_between_steps_has_its_mean_summed_anew(counted, edit):
    (p,) = parameters([(130, 257)])
    options = {"adaptive_tiny": True, "tiny_denom": 0.1}
    optimizer = KourkoutasBeta([p], lr=1e-2, **options)
    oracle = Oracle({"p": p.detach().numpy()}, Hyper(**options), lr=1e-2)
    for t in range(4):
        set_grads([p], t)
        optimizer.step()
        oracle.step({"p": p.grad.numpy()})
        if edit == "one element":  # which is one of many, and p.data counts no version
            p.data.view(-1)[1000] = 1e5
            oracle.params["p"].reshape(-1)[1000] = 1e5
            continue
        oracle.params["p"] *= 4
        if edit == "in place":
            with torch.no_grad():
                p.mul_(4)
        elif edit == "p.data":
            p.data.mul_(4)
        elif edit == "replaced":
            p.data = p.data * 4
        else:
            values = p.detach().numpy()
            values *= 4
    assert counted.steps == 4
    np.testing.assert_allclose(p.detach().numpy(), oracle.params["p"], rtol=2e-6, atol=1e-5)


@needs_kernel
@pytest.mark.parametrize("options", [{}, {"max_ratio": 1.5}, {"decay": 0.9, "weight_decay": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("size", [0.1, 1.25, 300.0])
def test_the_mean_magnitude_counts_in_the_step_that_reads_it(counted, size, dtype, options):
    (p,) = parameters([(130, 257)], dtype)
    with torch.no_grad():
        p.copy_(size * torch.sign(p))  # ⟨|θ|⟩ = size
    options = {"adaptive_tiny": True, "tiny_denom": 0.1, **options}
    optimizer = KourkoutasBeta([p], lr=1e-2, **options)
    oracle = Oracle({"p": p.detach().numpy()}, Hyper(**options), lr=1e-2)
    before = p.detach().double().numpy()
    set_grads([p], 0)
    optimizer.step()
    oracle.step({"p": p.grad.numpy()})
    moved, want = p.detach().double().numpy() - before, oracle.params["p"] - before
    epsilon = torch.finfo(dtype).eps
    np.testing.assert_allclose(moved, want, rtol=1e-5 if dtype is torch.float32 else 1e-12, atol=2 * epsilon * size)
    assert counted.steps == 1


@needs_kernel
def test_gradients_state_and_data_that_are_swapped_between_steps_are_followed(counted):
    def swap(t, params, optimizer):
        for p in params:
            if t == 1:
                p.data = p.data.clone()
                optimizer.state[p] = {k: v.clone() for k, v in optimizer.state[p].items()}
            if t == 2:
                optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"] * 2
            if t == 3:
                del optimizer.state[p]

    ours, theirs = parameters(), parameters()
    a = run(ours, steps=6, between=swap, **FULL)
    b = run(theirs, steps=6, between=swap, fused=False, **FULL)
    assert counted.steps == 6
    for x, y in zip(everything(ours, a), everything(theirs, b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-7)


@needs_kernel
def test_parameters_that_change_dtype_are_followed_or_handed_on():
    p = torch.nn.Parameter(torch.ones(100, dtype=torch.float64))
    optimizer = KourkoutasBeta([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    moved = p[0].item()
    p.grad = None
    p.data = p.data.float()
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = optimizer.state[p][name].float()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert p.dtype == torch.float32
    assert p[0].item() < moved
    assert torch.equal(p, p[:1].expand(100))


@needs_kernel
def test_dense_layouts_run_natively_and_others_are_handed_on(counted):
    dense = [
        torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
        torch.nn.Parameter(torch.randn(5, 4).t()),
    ]
    optimizer = KourkoutasBeta(dense)
    for p in dense:
        p.grad = torch.randn_like(p)
    optimizer.step()
    assert counted.steps == 1
    dense[1].grad = torch.randn(4, 5)  # laid out unlike its parameter
    before = dense[1].detach().clone()
    optimizer.step()
    assert counted.steps == 1
    assert not torch.equal(dense[1], before)


@needs_kernel
def test_gaps_in_memory_are_left_alone(counted):
    base = torch.zeros(6, 6)
    p = torch.nn.Parameter(base[::2, ::2])
    p.grad = torch.ones(3, 3)
    KourkoutasBeta([p], lr=1.0).step()
    assert (base != 0).sum() == 9
    assert counted.steps == 0


@needs_kernel
def test_tensor_subclasses_are_handed_on(counted):
    class Tagged(torch.Tensor):
        pass

    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3).as_subclass(Tagged)
    KourkoutasBeta([p], lr=0.1).step()
    assert counted.steps == 0
    assert p[0].item() < 1


@needs_kernel
def test_autograd_sees_that_parameters_were_written():
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = KourkoutasBeta([p])
    loss = (p * p).sum()
    loss.backward(retain_graph=True)
    version, grad_version = p._version, p.grad._version
    optimizer.step()
    assert p._version > version
    assert p.grad._version == grad_version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_survives_and_rounds_as_torch_rounds(dtype):
    patterns = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = patterns[patterns.isfinite()]
    p = torch.nn.Parameter(numbers.clone())
    p.grad = numbers.clone()
    optimizer = KourkoutasBeta([p], lr=0.0, beta1=0.7)
    optimizer.step()
    assert torch.equal(p.detach().view(torch.int16), numbers.view(torch.int16))
    want = (torch.tensor(1 - 0.7, dtype=torch.float32) * numbers.float()).to(dtype)
    assert torch.equal(optimizer.state[p]["exp_avg"], want)


@needs_kernel
def test_float32_gradients_of_float32_parameters_may_be_huge_without_losing_the_norm():
    p = torch.nn.Parameter(torch.ones(4))
    optimizer = KourkoutasBeta([p])
    p.grad = torch.full((4,), 1e25)
    optimizer.step()
    # r = 0.07·n with n = √4·1e25, whose square has no float32
    assert optimizer.state[p]["norm_ema"].item() == pytest.approx(0.07 * 2e25, rel=1e-6)


@needs_kernel
def test_denormal_numbers_still_exist_after_a_step():
    run(parameters(), steps=1)
    assert (torch.tensor([1e-40]) * torch.tensor([1.0])).item() > 0


@pytest.mark.parametrize(("options", "expected"), [({}, 8), (FULL, 12), ({"decay": 0, "max_ratio": 3}, 8)])
def test_state_takes_8_bytes_per_parameter_and_12_with_v_max(options, expected):
    params = parameters([(1000, 1000)])
    optimizer = run(params, steps=1, **options)
    tensors = optimizer.state[params[0]].values()
    assert sum(x.numel() * x.element_size() for x in tensors) == pytest.approx(expected * 1e6, rel=1e-4)


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PEAK = """
import sys, torch
sys.path.insert(0, {benchmarks!r})
from contestants import torch_contestant
from timing import peak_over
from kourkoutas.torch import KourkoutasBeta
torch.set_num_threads(1)
params = [torch.nn.Parameter(torch.ones(4096, 1024)) for _ in range(4)]
for p in params:
    p.grad = torch.ones_like(p)
steps = torch_contestant(KourkoutasBeta(params, {options}), "").steps
steps(2)
print(peak_over(steps) / (4 * 4096 * 1024 * 4))
"""


def peak(options):
    """The peak of one step over the memory before it, as a share of the parameters."""
    if not BENCHMARKS.exists():
        pytest.skip("benchmarks/ is not here")
    script = PEAK.format(options=options, benchmarks=str(BENCHMARKS))
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return float(done.stdout)


on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the high-water mark from /proc")


@needs_kernel
@on_linux
@pytest.mark.parametrize("options", ["", "decay=0.98, max_ratio=3, adaptive_tiny=True"], ids=["default", "full"])
def test_a_step_allocates_less_than_one_percent_of_the_parameters(options):
    assert peak(options) < 0.01


@on_linux
def test_the_measure_of_the_peak_sees_the_temporaries_of_foreach():
    assert peak("foreach=True") > 0.5


def test_the_environment_turns_the_kernel_off():
    script = "from kourkoutas.torch import kernel; print(kernel.extension)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "KBETA_NATIVE": "0"},
    )
    assert done.stdout.strip() == "None"


def test_a_build_without_a_compiler_succeeds_without_the_kernel(tmp_path):
    pytest.importorskip("setuptools", minversion="70.1")
    command = [sys.executable, "setup.py", "build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path / "t"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env={**os.environ, "CC": "no-such-compiler"})
    assert not list(tmp_path.rglob("*.so"))


@needs_kernel
def test_python_packs_the_fields_of_the_c_struct_in_its_order():
    assert kernel.FIELDS == _native.step.HYPER_FIELDS


@needs_kernel
def test_the_kernel_knows_the_state_by_the_names_of_the_front_end():
    assert _native.step.SCALARS == options.SCALARS
    assert _native.step.MOMENTS == options.MOMENTS


@needs_kernel
def test_a_kernel_of_other_sources_is_not_used_and_the_reason_says_so(restored, monkeypatch):
    monkeypatch.setattr(kernel, "FIELDS", kernel.FIELDS[::-1])
    kernel.connect()
    assert kernel.extension is None
    (route,) = KourkoutasBeta(parameters()).route()
    assert route.name == "foreach"
    assert "it was built from the sources of another version: build it again" in route.reason


@needs_kernel
def test_a_group_finds_its_state_among_many_parameters_as_fast_as_among_few():
    """Its entries may stand anywhere in the state: whoever gets its first gradient first stands first."""
    params = parameters([(3,)])
    optimizer = run(params, steps=1)

    def seconds(others):
        state = {**dict.fromkeys(range(others)), **optimizer.state}
        found = []
        for _ in range(50):
            start = time.perf_counter()
            assert kernel.gather(optimizer._groups[0], state) is not None
            found.append(time.perf_counter() - start)
        return min(found)

    assert seconds(100_000) < 5 * seconds(10)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_kernels_compile_without_a_warning(tmp_path):
    pytest.importorskip("setuptools", minversion="70.1")
    headers = Path(sysconfig.get_paths()["include"])
    if not (headers / "Python.h").exists():
        pytest.skip("Python's C headers are not there")
    for extension in runpy.run_path(str(ROOT / "setup.py"))["KERNELS"]:
        flags = [*extension.extra_compile_args, *(f"-D{name}={value}" for name, value in extension.define_macros)]
        assert {"-Wall", "-Wextra"} <= set(flags)
        for source in extension.sources:
            command = ["cc", *flags, "-Werror", "-fPIC", f"-I{headers}", "-c", source, "-o", str(tmp_path / "object.o")]
            done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
