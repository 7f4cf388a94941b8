"""The Triton kernels beside torch's own operations: dtypes, layouts, options, and what they are told about tensors."""

import copy

import numpy as np
import pytest
import torch

from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper, NonFiniteGradient
from kourkoutas.torch import KourkoutasBeta, triton_step
from kourkoutas.torch.triton_step import BLOCK, TritonStep
from tests.gpu.conftest import DEVICE, INTERPRETED

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FULL = {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}
SIZES = [(3,), (5, 7), (), (BLOCK,), (BLOCK + 1,), (2, BLOCK + 8), (0, 4)]


def parameters(sizes=SIZES, dtype=F32, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    wide = F64 if dtype in (F64, torch.complex128) else F32
    drawn = [scale * torch.randn(size, generator=generator, dtype=wide) for size in sizes]
    return [torch.nn.Parameter(x.to(dtype).to(DEVICE)) for x in drawn]


def set_grads(params, t):
    generator = torch.Generator().manual_seed(100 + t)
    for p in params:
        g = torch.randn(p.shape, generator=generator) * (30.0 if t == 3 else 1.0)
        if p.is_complex():
            g = torch.complex(g, torch.randn(p.shape, generator=generator))
        p.grad = torch.empty_like(p).copy_(g.to(p.dtype).to(DEVICE))


def train(params, steps=4, **options):
    optimizer = KourkoutasBeta(params, lr=1e-2, **options)
    for t in range(steps):
        set_grads(params, t)
        optimizer.step()
    return optimizer


def both(steps=4, make=parameters, **options):
    """The same training by the kernels and by torch's operations."""
    ours, theirs = make(), make()
    a = train(ours, steps, **options)
    assert [route.name for route in a.route()] == ["triton"]
    b = train(theirs, steps, foreach=True, **options)
    assert [route.name for route in b.route()] == ["foreach"]
    return (ours, a), (theirs, b)


def assert_alike(first, second, rtol, atol):
    (ours, a), (theirs, b) = first, second
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)
        assert a.state[p].keys() == b.state[q].keys()
        for name, x in a.state[p].items():
            assert x.dtype == b.state[q][name].dtype
            torch.testing.assert_close(x, b.state[q][name], rtol=rtol, atol=atol, equal_nan=True)


OPTIONS = {
    "default": {},
    "full": FULL,
    "weight decay, maximize": {"weight_decay": 0.1, "maximize": True},
    "skip": {"nonfinite": "skip"},
    "one bucket, exact": {"buckets": "global", "bias_correction": "exact", "lr_warmup": True, "max_ratio": 0.5},
    "no bias correction": {"bias_correction": "none", "decay": 1.0, "weight_decay": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_agrees_with_torchs_operations(name):
    assert_alike(*both(**OPTIONS[name]), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("dtype", [F64, torch.complex64, torch.complex128], ids=str)
def test_wide_and_complex_tensors_agree_with_torchs_operations(dtype):
    rtol = 1e-12 if dtype in (F64, torch.complex128) else 2e-6
    assert_alike(*both(make=lambda: parameters(dtype=dtype), **FULL), rtol=rtol, atol=rtol / 10)


@pytest.mark.parametrize("state_dtype", [None, F32], ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_low_precision_is_rounded_to_nearest(dtype, state_dtype):
    # One step: a last bit of float32 that differs may round otherwise, and would be seen in all steps after it.
    made = both(1, make=lambda: parameters(dtype=dtype), state_dtype=state_dtype, **FULL)
    for p, q in zip(made[0][0], made[1][0], strict=True):
        assert (p != q).sum().item() <= 1 + p.numel() / 500
    ulp = 2**-7 if dtype is BF16 else 2**-10
    assert_alike(*made, rtol=ulp, atol=1e-6)


@pytest.mark.parametrize("options", [{"state_dtype": BF16}, {"stochastic_rounding": True}], ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_noise_has_the_same_bits_as_on_other_routes(dtype, options):
    (ours, a), (theirs, b) = both(1, make=lambda: parameters(dtype=dtype), **options, decay=0.98)
    for p, q in zip(ours, theirs, strict=True):
        pairs = [
            (p, q),
            *((a.state[p][name], b.state[q][name]) for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
        ]
        for x, y in pairs:
            if x.dtype is BF16:
                # A last bit of float32 that differs moves the rounding of one element in some ten thousand.
                assert (x != y).sum().item() <= 1 + x.numel() / 2000


def test_a_second_moment_that_changes_by_less_than_a_bfloat16_still_moves():
    (p,) = parameters([(2 * BLOCK,)])
    optimizer = KourkoutasBeta([p], lr=0.0, beta2_min=0.999, state_dtype=BF16)
    p.grad = torch.ones_like(p)
    for _ in range(40):
        optimizer.step()
    assert optimizer.state[p]["exp_avg_sq"].float().mean().item() == pytest.approx(1 - 0.999**40, rel=0.05)


@pytest.mark.parametrize("scale", [0.1, 10.0])
def test_adaptive_tiny_counts_large_parameters_at_their_size(scale, launches):
    # ⟨|θ|⟩ is far below 1, or far above it, where the update has to be corrected.
    options = {"adaptive_tiny": True, "tiny_denom": 0.1, "decay": 0.98}
    params = parameters(scale=scale)
    start = {str(i): p.detach().cpu().double().numpy() for i, p in enumerate(params)}
    oracle = Oracle(start, Hyper(**options), lr=1e-2)
    optimizer = KourkoutasBeta(params, lr=1e-2, **options)
    for t in range(3):
        set_grads(params, t)
        oracle.step({str(i): p.grad.cpu().double().numpy() for i, p in enumerate(params)})
        optimizer.step()
    assert "correct" in launches
    for i, p in enumerate(params):
        np.testing.assert_allclose(p.detach().cpu().numpy(), oracle.params[str(i)], rtol=2e-6, atol=2e-6)


def test_tensors_that_are_not_aligned_are_taken_with_those_that_are():
    def shifted():
        made = []
        for i, p in enumerate(parameters([(3, BLOCK), (2 * BLOCK,), (7,)])):
            memory = torch.empty(p.numel() + 3, device=DEVICE)
            view = memory[i : i + p.numel()].view(p.shape)
            made.append(torch.nn.Parameter(view.copy_(p.detach())))
        return made

    (ours, a), (theirs, b) = both(make=shifted, **FULL)
    assert [p.data_ptr() % 16 for p in ours] == [0, 4, 8]
    assert_alike((ours, a), (theirs, b), rtol=2e-6, atol=2e-7)


def test_transposed_and_channels_last_tensors_are_taken_as_they_lie():
    def made():
        matrix, image = parameters([(40, 30), (2, 3, 5, 7)])
        turned = image.detach().to(memory_format=torch.channels_last)
        return [torch.nn.Parameter(matrix.detach().t()), torch.nn.Parameter(turned)]

    assert_alike(*both(make=made), rtol=2e-6, atol=2e-7)


def test_what_is_not_plain_goes_by_torchs_operations():
    p = torch.nn.Parameter(torch.ones(6, 4, device=DEVICE)[:, ::2])
    p.grad = torch.ones_like(p)
    optimizer = KourkoutasBeta([p], lr=0.1)
    assert [route.name for route in optimizer.route()] == ["foreach"]
    optimizer.step()
    q = torch.nn.Parameter(torch.ones(4, 3, device=DEVICE))
    q.grad = torch.ones(3, 4, device=DEVICE).t()  # laid out unlike its parameter
    assert [route.name for route in KourkoutasBeta([q]).route()] == ["foreach"]


def test_norms_beyond_the_square_root_of_float32_do_not_overflow():
    (p,) = parameters([(3 * BLOCK,)])
    optimizer = KourkoutasBeta([p], lr=1e-3)
    p.grad = torch.full_like(p, 1e18)
    optimizer.step()
    r = optimizer.state[p]["norm_ema"].item()
    assert r == pytest.approx(0.07 * 1e18 * (3 * BLOCK) ** 0.5, rel=1e-6)
    assert p.isfinite().all()


def test_norms_of_tiny_and_of_empty_gradients_are_right():
    p, q = parameters([(BLOCK + 3,), (0,)])
    optimizer = KourkoutasBeta([p, q])
    p.grad, q.grad = torch.full_like(p, 1e-40), torch.zeros_like(q)
    optimizer.step()
    assert optimizer.state[p]["norm_ema"].item() == pytest.approx(
        0.07 * 1e-40 * (BLOCK + 3) ** 0.5, rel=1e-2, abs=1e-44
    )
    assert optimizer.state[q]["norm_ema"].item() == 0


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_skipped_bucket_keeps_every_bit_and_others_move(bad):
    params = parameters()
    optimizer = train(params, 2, nonfinite="skip", **FULL)
    before = copy.deepcopy([(p.detach(), dict(optimizer.state[p])) for p in params])
    set_grads(params, 5)
    params[1].grad[0, 0] = bad
    optimizer.step()
    theta, state = before[1]
    assert torch.equal(theta, params[1])
    for name, x in optimizer.state[params[1]].items():
        assert torch.equal(x, state[name] + 1 if name == "skipped" else state[name])
    assert not torch.equal(before[5][0], params[5])


def test_a_norm_that_is_not_finite_raises_before_anything_moves():
    params = parameters()
    optimizer = train(params, 1, nonfinite="raise")
    before = [p.detach().clone() for p in params]
    params[3].grad[5] = torch.nan
    with pytest.raises(NonFiniteGradient, match="bucket"):
        optimizer.step()
    assert all(torch.equal(p, x) for p, x in zip(params, before, strict=True))


def test_hyper_parameters_may_be_tensors_of_the_device():
    number = {"lr": torch.tensor(1e-2, device=DEVICE), "betas": (torch.tensor(0.8, device=DEVICE), 0.99)}
    results = []
    for options in (number, {"lr": 1e-2, "betas": (0.8, 0.99)}):
        params = parameters([(30,), (4, 5)])
        betas = options["betas"]
        chosen = {"lr": options["lr"], "beta1": betas[0], "beta2_max": betas[1], "max_ratio": 0.5, "weight_decay": 0.1}
        optimizer = KourkoutasBeta(params, **chosen)
        for t in range(3):
            set_grads(params, t)
            optimizer.step()
        assert [route.name for route in optimizer.route()] == ["triton"]
        results.append(params)
    for p, q in zip(*results, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_autograd_sees_that_tensors_were_written():
    (p,) = parameters([(4,)])
    y = (p * p).sum()
    p.grad = torch.ones_like(p)
    KourkoutasBeta([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_one_launch_per_dtype_whatever_the_number_of_tensors(launches):
    params = [*parameters(), *parameters(dtype=F64), *parameters([(9,)] * 20)]
    optimizer = train(params, 1)
    assert launches == ["measure", "total", "measure", "total", "update", "update"]
    assert [route.name for route in optimizer.route()] == ["triton"]


@pytest.fixture
def uploads(monkeypatch):
    seen = []
    upload = TritonStep.upload

    def noted(self, numbers):
        seen.append(numbers.shape)
        return upload(self, numbers)

    monkeypatch.setattr(TritonStep, "upload", noted)
    return seen


def test_a_table_is_uploaded_only_when_an_address_has_changed(uploads):
    params = parameters()
    optimizer = train(params, 1)
    first = len(uploads)
    assert first == 2  # addresses, and which block belongs to which tensor
    for _ in range(3):
        optimizer.step()
    assert len(uploads) == first
    old = params[1].grad  # so that its memory is not used again
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    assert len(uploads) > first
    before = params[1].detach().clone()
    optimizer.step()
    assert not torch.equal(before, params[1])
    assert old is not params[1].grad


def test_steps_of_changing_subsets_keep_a_table_each(uploads):
    params = parameters([(3,), (4,), (5,)])
    optimizer = train(params, 1)
    grads = [p.grad for p in params]
    for present in ([0], [1, 2], [0], [1, 2], [0, 1, 2]):
        for i, p in enumerate(params):
            p.grad = grads[i] if i in present else None
        optimizer.step()
    assert len(uploads) == 2 * 3


@pytest.mark.skipif(not INTERPRETED, reason="a real device captures real graphs: test_a_captured_step_replays")
def test_nothing_is_uploaded_while_a_cuda_graph_is_captured(uploads, launches, monkeypatch):
    def in_a_graph(self, own, collected):
        made(self, own, collected)
        self.in_graph = capturing

    made, capturing = TritonStep.__init__, False
    monkeypatch.setattr(TritonStep, "__init__", in_a_graph)
    params, others = parameters(), parameters()
    optimizer, other = (KourkoutasBeta(each, lr=1e-2, decay=0.98) for each in (params, others))
    for t in range(3):
        set_grads(params, t)
        set_grads(others, t)
        if t == 1:
            uploads.clear()
        capturing = t > 0  # with other gradients than before
        optimizer.step()
        assert [route.name for route in optimizer.route()] == ["triton"]
        assert bool(uploads) == (t == 0)
        capturing = False
        kept, uploads[:] = list(uploads), []
        other.step()
        uploads[:] = kept
    assert "note" in launches
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    capturing = True
    set_grads(params, 3)
    params[0].grad = None  # tensors whose table was never uploaded
    assert [route.name for route in optimizer.route()] == ["foreach"]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, FULL], ids=["default", "full"])
def test_a_captured_step_replays(options):
    params, others = parameters(), parameters()
    graphed, eager = (KourkoutasBeta(each, lr=1e-2, capturable=True, **options) for each in (params, others))
    set_grads(params, 0)
    set_grads(others, 0)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            graphed.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graphed.step()
    for _ in range(5):
        graph.replay()
    for _ in range(8):
        eager.step()
    torch.cuda.synchronize()
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_programs_may_run_in_any_order(monkeypatch):
    if not INTERPRETED:
        pytest.skip("a GPU runs them in any order anyway")
    from triton.runtime import interpreter

    results = []
    for backwards in (False, True):
        builder = type(interpreter.interpreter_builder)
        set_index = builder.set_grid_idx

        def turned(self, x, y, z, backwards=backwards, set_index=set_index):
            set_index(self, self.grid_dim[0] - 1 - x if backwards else x, y, z)

        with monkeypatch.context() as patch:
            patch.setattr(builder, "set_grid_idx", turned)
            params = parameters()
            train(params, 2, **FULL)
        results.append(params)
    assert all(torch.equal(p, q) for p, q in zip(*results, strict=True))


def test_the_launcher_and_the_kernels_agree_on_sizes():
    from kourkoutas.torch import triton_kernels

    assert triton_step.BLOCK == triton_kernels.BLOCK
    assert triton_step.LANES == triton_kernels.LANES
