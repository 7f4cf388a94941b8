"""`stochastic_rounding`: what is stored in bfloat16, parameters and state, is rounded up or down by chance."""

import io

import numpy as np
import pytest
import torch

from kourkoutas.torch import KourkoutasBeta, rounding
from tests.torch_frontend.routes import on

BF16 = torch.bfloat16
FULL = {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}
SIZES = [(3,), (130, 257), (), (9000,), (0, 4)]
STOCHASTIC = {"stochastic_rounding": True}

every_route = on("kernel", "fused", "plain", "foreach", "capturable")


def parameters(sizes=SIZES, dtype=BF16):
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=generator).to(dtype) for s in sizes]
    params.append(torch.randn((40, 30), generator=generator).to(dtype).t())
    return [torch.nn.Parameter(p) for p in params]


def set_grads(params, t):
    generator = torch.Generator().manual_seed(100 + t)
    for p in params:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


def train(params, steps, **options):
    optimizer = KourkoutasBeta(params, **{"lr": 1e-2, **STOCHASTIC, **options})
    for t in range(steps):
        set_grads(params, t)
        optimizer.step()
    return optimizer


def bits_of(x):
    """Those of a bfloat16 tensor, in the order of its memory."""
    flat = x.detach().as_strided((x.numel(),), (1,))
    return flat.view(torch.int16).numpy().view(np.uint16)


class Noise:
    """What _native/formats.h defines, once more, in NumPy."""

    def __init__(self, t, number, count):
        seed = self.mixed(self.mixed(np.array([t], np.uint32)) + np.uint32(number))
        self.hash = self.mixed(np.arange(count, dtype=np.uint32) * np.uint32(0x1E3779B1) + seed)

    @staticmethod
    def mixed(h):
        h = h ^ (h >> np.uint32(16))
        h = h * np.uint32(0x45D9F3B5)
        h = h ^ (h >> np.uint32(13))
        h = h * np.uint32(0x3C6EF373)
        return h ^ (h >> np.uint32(16))

    def of(self, name):
        if name == "param":
            return self.mixed(self.hash ^ np.uint32(0x9E3779B9)) & np.uint32(0xFFFF)
        return self.hash & np.uint32(0xFFFF) if name == "exp_avg" else self.hash >> np.uint32(16)

    def rounded(self, name, values):
        """float32 values, which must be finite, as the bits of bfloat16."""
        return ((values.astype(np.float32).view(np.uint32) + self.of(name)) >> np.uint32(16)).astype(np.uint16)


def widened(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


@every_route
def test_every_route_rounds_parameters_with_the_bits_that_are_defined(route):
    # With gradients of 0 a step only fades θ, by 2^-12 of itself: float32 holds the result without rounding.
    params = parameters()
    optimizer = KourkoutasBeta(params, lr=2.0**-6, weight_decay=2.0**-6, **STOCHASTIC, **route)
    for t in range(1, 4):
        before = [widened(bits_of(p)) for p in params]
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for number, (p, theta) in enumerate(zip(params, before, strict=True)):
            faded = theta - theta * np.float32(2.0**-12)
            assert (bits_of(p) == Noise(t, number, p.numel()).rounded("param", faded)).all()


@every_route
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_every_route_rounds_state_with_the_bits_that_are_defined(route, dtype):
    # m = g/2 and v = v_max = g²/2 of a bfloat16 g are float32 numbers without rounding.
    params = parameters(dtype=dtype)
    betas = {"beta1": 0.5, "beta2_min": 0.5, "beta2_max": 0.5, "decay": 1.0}
    optimizer = KourkoutasBeta(params, lr=1e-3, state_dtype=BF16, **betas, **route)
    set_grads(params, 0)
    for p in params:
        p.grad = p.grad.bfloat16().to(dtype)
    optimizer.step()
    for number, p in enumerate(params):
        noise, g = Noise(1, number, p.numel()), widened(bits_of(p.grad.bfloat16()))
        state = optimizer.state[p]
        assert (bits_of(state["exp_avg"]) == noise.rounded("exp_avg", g / 2)).all()
        assert (bits_of(state["exp_avg_sq"]) == noise.rounded("exp_avg_sq", g * g / 2)).all()
        assert (bits_of(state["max_exp_avg_sq"]) == noise.rounded("max_exp_avg_sq", g * g / 2)).all()


@every_route
@pytest.mark.parametrize(
    "options", [{}, FULL, {"state_dtype": torch.float32}], ids=["default", "full", "float32 state"]
)
def test_every_route_rounds_a_whole_step_alike(route, options):
    ours, plain = parameters(), parameters()
    train(ours, 1, **route, **options)
    train(plain, 1, fused=False, **options)
    for p, q in zip(ours, plain, strict=True):
        # Routes differ in the last bit of a float32, which moves the rounding of one element in some ten thousand.
        assert (p != q).sum().item() <= 1 + p.numel() / 2000
        torch.testing.assert_close(p, q, rtol=2**-7, atol=0)


@every_route
@pytest.mark.parametrize("state_dtype", [None, torch.float32], ids=str)
def test_steps_below_half_a_bfloat16_move_a_model_on_average_as_float32_does(route, state_dtype):
    # Around 1.5 the bfloat16 numbers are 2^-7 apart; a step is at most lr = 2^-12, a sixteenth of half of that.
    count, steps, lr, apart = 40_000, 60, 2.0**-12, 2.0**-7
    models = {}
    for dtype, options in ((BF16, {**STOCHASTIC, "state_dtype": state_dtype}), (torch.float32, {})):
        p = torch.nn.Parameter(torch.full((count,), 1.5, dtype=dtype))
        optimizer = KourkoutasBeta([p], lr=lr, bias_correction="exact", **options, **route)
        for t in range(steps):
            p.grad = torch.full_like(p, 1.0 + 0.5 * (t % 2))
            optimizer.step()
        models[dtype] = p.detach().double() - 1.5
    moved, wanted = models[BF16].mean().item(), models[torch.float32].mean().item()
    assert wanted < -steps * lr / 2  # the float32 model goes steadily down
    # An element that is to move by d ends at a multiple of `apart`, with a variance of at most |d|·apart.
    deviation = (abs(wanted) * apart / count) ** 0.5
    # In bfloat16, v is v·(1 ± 2^-8) after each step, and the mean of 1/√v is above 1/√(mean v) by 3/8 of its variance.
    bias = 0 if state_dtype is torch.float32 else abs(wanted) * 3 / 8 * steps * (2.0**-8) ** 2
    assert abs(moved - wanted) < 5 * deviation + bias


def test_without_it_such_steps_are_lost():
    p = torch.nn.Parameter(torch.full((100,), 1.5, dtype=BF16))
    optimizer = KourkoutasBeta([p], lr=2.0**-12, bias_correction="exact")
    for _ in range(60):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert (p == 1.5).all()


@every_route
def test_bfloat16_state_is_rounded_stochastically_too(route):
    # 1 - β2 = 0.001 of the way per step: rounding to nearest would stay where it is.
    p = torch.nn.Parameter(torch.zeros(20_000, dtype=BF16))
    optimizer = KourkoutasBeta([p], lr=0.0, beta2_min=0.999, **STOCHASTIC, **route)
    p.grad = torch.ones_like(p)
    for _ in range(100):
        optimizer.step()
    v = optimizer.state[p]["exp_avg_sq"]
    assert v.dtype is BF16
    assert v.float().mean().item() == pytest.approx(1 - 0.999**100, rel=0.02)


@every_route
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64], ids=str)
def test_what_is_not_stored_in_bfloat16_is_not_rounded(route, dtype):
    plain, ours = parameters(dtype=dtype), parameters(dtype=dtype)
    a = train(plain, 3, **route, stochastic_rounding=False)
    b = train(ours, 3, **route)
    for p, q in zip(plain, ours, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(x, b.state[q][name]) for name, x in a.state[p].items())


@every_route
def test_a_skipped_bucket_keeps_every_bit(route):
    params = parameters()
    optimizer = train(params, 3, **route, nonfinite="skip", weight_decay=0.1)
    before = [p.detach().clone() for p in params]
    set_grads(params, 9)
    params[1].grad[0, 0] = torch.nan
    optimizer.step()
    assert torch.equal(params[1], before[1])
    assert not torch.equal(params[3], before[3])


@every_route
def test_what_is_not_finite_stays_what_it_is(route):
    p = torch.nn.Parameter(torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], dtype=BF16))
    optimizer = KourkoutasBeta([p], **STOCHASTIC, **route)
    for _ in range(5):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p[:2].tolist() == [torch.inf, -torch.inf]
    assert p[2].isnan()
    assert p[3].isfinite()


def test_the_noise_of_parameters_is_not_that_of_state_step_or_place():
    like = torch.zeros(100_000)
    hashes = [rounding.noise_bits(torch.tensor(t), place, like) for t, place in ((1.0, 0), (2.0, 0), (1.0, 1))]
    rows = [rounding.noise_of("param", bits) for bits in hashes]
    rows += [rounding.noise_of(name, hashes[0]) for name in ("exp_avg", "exp_avg_sq")]
    noise = torch.stack(rows).double()
    correlation = torch.corrcoef(noise) - torch.eye(len(rows))
    assert correlation.abs().max() < 5 / len(like) ** 0.5
    assert (noise.mean(1) / 0xFFFF - 0.5).abs().max() < 5 * (1 / 12 / len(like)) ** 0.5


@pytest.mark.parametrize("saved_by", ["kernel", "plain"])
def test_saved_and_loaded_it_goes_on_with_the_same_bits(saved_by):
    fused = None if saved_by == "kernel" else False
    through = parameters()
    optimizer = train(through, 4, fused=fused)
    stopped = [torch.nn.Parameter(p.detach().clone()) for p in through]
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = KourkoutasBeta(stopped)  # the saved group has the option
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert loaded.param_groups[0]["stochastic_rounding"] is True
    for params, one in ((through, optimizer), (stopped, loaded)):
        for t in range(4, 8):
            set_grads(params, t)
            one.step()
    for p, q in zip(through, stopped, strict=True):
        assert torch.equal(p, q)
        assert all(torch.equal(x, loaded.state[q][name]) for name, x in optimizer.state[p].items())


def test_it_can_be_set_for_one_group_and_written_into_a_group_later():
    a, b = (torch.nn.Parameter(torch.full((1000,), 1.5, dtype=BF16)) for _ in range(2))
    optimizer = KourkoutasBeta([{"params": [a], **STOCHASTIC}, {"params": [b]}], lr=2.0**-11, bias_correction="exact")
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    optimizer.step()
    assert (a != 1.5).any()
    assert (b == 1.5).all()
    optimizer.param_groups[1]["stochastic_rounding"] = True
    optimizer.step()
    assert (b != 1.5).any()


def test_bad_values_are_named():
    with pytest.raises(TypeError, match=r"`stochastic_rounding` must be True or False; got 'yes'"):
        KourkoutasBeta(parameters(), stochastic_rounding="yes")
    with pytest.raises(
        RuntimeError, match=r"`stochastic_rounding` rounds to bfloat16 only; got a torch.float16 parameter"
    ):
        KourkoutasBeta(parameters(dtype=torch.float16), stochastic_rounding=True)
