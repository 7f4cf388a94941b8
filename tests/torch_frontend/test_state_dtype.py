"""`state_dtype`: m, v and v_max in bfloat16 with stochastic rounding, or in float32 beside low-precision parameters."""

import copy
import io

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta, kernel
from kourkoutas.torch.rounding import noise_bits, rounded
from tests.torch_frontend.routes import on

BF16 = torch.bfloat16
FULL = {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}
SIZES = [(3,), (130, 257), (), (9000,), (0, 4)]
PLAIN = {"fused": False}


def parameters(sizes=SIZES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in sizes]


def set_grads(params, t, scale=1.0):
    generator = torch.Generator().manual_seed(100 + t)
    for p in params:
        p.grad = scale * torch.randn(p.shape, generator=generator).to(p.dtype) * (30.0 if t == 3 else 1.0)


def moments(optimizer, p):
    return {name: x for name, x in optimizer.state[p].items() if name.startswith(("exp_", "max_"))}


def train(params, steps, **options):
    optimizer = KourkoutasBeta(params, lr=1e-2, **options)
    for t in range(steps):
        set_grads(params, t)
        optimizer.step()
    return optimizer


every_route = on("kernel", "fused", "plain", "foreach", "capturable")


@every_route
@pytest.mark.parametrize("options", [{}, FULL], ids=["default", "full"])
def test_bfloat16_states_take_4_or_6_bytes_a_parameter(route, options):
    params = parameters()
    optimizer = train(params, 2, **route, state_dtype=BF16, **options)
    for p in params:
        assert {x.dtype for x in moments(optimizer, p).values()} == {BF16}
        assert sum(x.nbytes for x in moments(optimizer, p).values()) == (6 if options else 4) * p.numel()


@every_route
@pytest.mark.parametrize("options", [{}, FULL], ids=["default", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_every_route_rounds_one_step_alike(route, options, dtype):
    ours, plain = parameters(dtype=dtype), parameters(dtype=dtype)
    a = train(ours, 1, **route, state_dtype=BF16, **options)
    b = train(plain, 1, **PLAIN, state_dtype=BF16, **options)
    for p, q in zip(ours, plain, strict=True):
        for name, x in moments(a, p).items():
            # Routes differ in the last bit of a float32, which moves the rounding of one element in some ten thousand.
            different = (x != b.state[q][name]).sum().item()
            assert different <= 1 + x.numel() / 2000
            torch.testing.assert_close(x, b.state[q][name], rtol=2**-7, atol=0)


def test_a_transposed_parameter_is_rounded_alike_natively_and_not():
    if kernel.extension is None:
        pytest.skip("the native kernel was not built")
    results = []
    for options in ({}, {"fused": False}):
        p = torch.nn.Parameter(parameters([(40, 30)])[0].detach().t())
        optimizer = KourkoutasBeta([p], state_dtype=BF16, **options)
        p.grad = torch.full_like(p, 0.3)
        optimizer.step()
        results.append(optimizer.state[p]["exp_avg_sq"].clone())
    assert torch.equal(*results)
    assert len(results[0].unique()) == 2  # up and down


def test_rounding_is_right_on_average_and_leaves_bfloat16_numbers_and_what_is_not_finite_alone():
    x = torch.full((200_000,), 1.0 + 0.3 * 2**-7)
    y = rounded(x, noise_bits(torch.tensor(1.0), 0, x) & 0xFFFF)
    assert set(y.tolist()) == {1.0, 1.0 + 2**-7}
    share = (y > 1).float().mean().item()
    assert abs(share - 0.3) < 5 * (0.3 * 0.7 / len(x)) ** 0.5
    kept = torch.tensor([0.0, -0.0, 1.5, -(2.0**-130), torch.inf, -torch.inf])
    assert torch.equal(rounded(kept, torch.full_like(kept, 0xFFFF, dtype=torch.int64)).float(), kept)
    assert rounded(torch.tensor([torch.nan]), torch.tensor([0xFFFF])).isnan().all()


def test_the_noise_of_a_step_is_not_that_of_another_step_place_or_moment():
    like = torch.zeros(100_000)
    one, step, place = (noise_bits(torch.tensor(t), i, like) for t, i in ((1.0, 0), (2.0, 0), (1.0, 1)))
    columns = torch.stack([one & 0xFFFF, one >> 16, step & 0xFFFF, place & 0xFFFF]).double()
    correlation = torch.corrcoef(columns) - torch.eye(4)
    assert correlation.abs().max() < 5 / len(like) ** 0.5
    assert (columns.mean(1) / 0xFFFF - 0.5).abs().max() < 5 * (1 / 12 / len(like)) ** 0.5


@every_route
def test_a_second_moment_that_changes_by_less_than_a_bfloat16_still_moves(route):
    # 1 - β2 = 0.001 of the way per step: rounding to nearest would stay where it is.
    params = parameters([(20_000,)])
    optimizer = KourkoutasBeta(params, lr=0.0, beta2_min=0.999, **route, state_dtype=BF16)
    params[0].grad = torch.ones_like(params[0])
    for _ in range(100):
        optimizer.step()
    v = optimizer.state[params[0]]["exp_avg_sq"].float()
    assert v.mean().item() == pytest.approx(1 - 0.999**100, rel=0.02)


@every_route
def test_a_skipped_bucket_keeps_every_bit(route):
    params = parameters()
    optimizer = train(params, 3, **route, state_dtype=BF16, nonfinite="skip")
    before = copy.deepcopy([moments(optimizer, p) for p in params])
    set_grads(params, 9)
    params[1].grad[0, 0] = torch.nan
    optimizer.step()
    after = [moments(optimizer, p) for p in params]
    assert all(torch.equal(before[1][name], after[1][name]) for name in before[1])
    assert not torch.equal(before[3]["exp_avg"], after[3]["exp_avg"])


@pytest.mark.parametrize("state_dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_saved_and_loaded_it_goes_on_with_the_same_bits(dtype, state_dtype):
    through = parameters(dtype=dtype)
    optimizer = train(through, 4, state_dtype=state_dtype)
    stopped = [torch.nn.Parameter(p.detach().clone()) for p in through]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = KourkoutasBeta(stopped, lr=1e-2, state_dtype=state_dtype)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    for params, one in ((through, optimizer), (stopped, loaded)):
        for t in range(4, 8):
            set_grads(params, t)
            one.step()
    for p, q in zip(through, stopped, strict=True):
        assert torch.equal(p, q)
        for name, x in moments(optimizer, p).items():
            assert x.dtype is loaded.state[q][name].dtype is state_dtype
            assert torch.equal(x, loaded.state[q][name])


def test_an_adam_checkpoint_loads_into_bfloat16_states():
    params = parameters()
    adam = torch.optim.Adam(params)
    set_grads(params, 0)
    adam.step()
    saved = adam.state_dict()
    optimizer = KourkoutasBeta(params, state_dtype=BF16)
    optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0]}]})
    assert torch.equal(optimizer.state[params[1]]["exp_avg"], adam.state[params[1]]["exp_avg"].bfloat16())
    optimizer.step()


@every_route
def test_float32_states_of_bfloat16_parameters_are_those_of_float32_arithmetic(route):
    low = parameters(dtype=BF16)
    high = [torch.nn.Parameter(p.detach().float()) for p in low]
    a = KourkoutasBeta(low, lr=0.0, state_dtype=torch.float32, **route)
    b = KourkoutasBeta(high, lr=0.0, fused=False)
    for t in range(5):
        set_grads(low, t)
        for p, q in zip(low, high, strict=True):
            q.grad = p.grad.float()
        a.step()
        b.step()
    for p, q in zip(low, high, strict=True):
        for name, x in moments(a, p).items():
            assert x.dtype is torch.float32
            torch.testing.assert_close(x, b.state[q][name], rtol=1e-6, atol=1e-6)


def test_bad_values_are_named():
    with pytest.raises(ValueError, match=r"`state_dtype` must be None, .* got torch.int8"):
        KourkoutasBeta(parameters(), state_dtype=torch.int8)
    for dtype in (torch.float64, torch.complex64):
        with pytest.raises(RuntimeError, match=f"`state_dtype` needs float32, bfloat16 or float16 .* got {dtype}"):
            KourkoutasBeta(parameters(dtype=dtype), state_dtype=BF16)
