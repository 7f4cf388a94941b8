"""Adam's contract: what the framework's own optimizer suites ask, and nothing half done when a step raises."""

import copy
import math
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from kourkoutas.torch import KourkoutasBeta, kernel
from tests.torch_frontend.routes import on, on_every_route

BY_NAME = on("kernel", "fused", "plain", "foreach", "capturable")


def parameter(*values):
    return torch.nn.Parameter(torch.tensor(values))


def everything(params, optimizer):
    return [x.detach().clone() for p in params for x in (p, *optimizer.state.get(p, {}).values())]


class Watch(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


# Tensors without storage


@on_every_route
def test_a_zero_tensor_without_storage_is_a_gradient_of_zeros(route):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    ours, theirs = KourkoutasBeta([p], **route), KourkoutasBeta([q], fused=False)
    for gradient in (torch.ones(2), torch._efficientzerotensor(2), torch._efficientzerotensor(2)):
        p.grad = gradient
        q.grad = torch.zeros(2) if gradient._is_zerotensor() else gradient.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@BY_NAME
def test_a_functionalized_step_changes_what_it_should(route):
    start = torch.tensor([1.0, 2.0])

    def step(value, grad):
        p = torch.nn.Parameter(value.clone())
        p.grad = grad
        KourkoutasBeta([p], lr=0.1, **route).step()
        return p.detach()

    want = step(start, torch.ones(2))
    got = torch.func.functionalize(step)(start, torch.ones(2))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_a_functional_tensor_that_outlives_its_transform_does_not_crash_the_process():
    script = """
    import torch
    from kourkoutas.torch import KourkoutasBeta
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch._to_functional_tensor(torch.ones(3))
    try:
        KourkoutasBeta([p], lr=0.1).step()
    except RuntimeError:
        pass
    print("alive")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "alive", done.stderr


# Lazy views


@on_every_route
def test_a_negated_view_is_a_gradient_with_its_sign(route):
    p, q = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    p.grad = torch.full((1,), 100j).conj().imag  # -100, held as +100 and a bit
    assert p.grad.is_neg()
    q.grad = torch.full((1,), -100.0)
    for x in (p, q):
        KourkoutasBeta([x], lr=0.1, **route).step()
    assert p.item() > 0
    torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


@on("plain", "foreach", "kernel")
def test_a_conjugated_view_is_a_gradient_with_its_sign(route):
    z = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    z.grad = torch.full((1,), 3 + 4j).conj()
    KourkoutasBeta([z], lr=0.1, **route).step()
    assert z.real.item() < 0 < z.imag.item()


# Modes and tracers


def test_a_dispatch_mode_sees_the_step():
    p = parameter(1.0, 2.0)
    p.grad = torch.ones(2)
    optimizer = KourkoutasBeta([p])
    optimizer.step()
    with Watch() as watch:
        optimizer.step()
    assert any("foreach" in name for name in watch.seen)
    assert p[0].item() < 1


@pytest.mark.parametrize("options", [{}, {"fused": False}, {"foreach": True}, {"beta2_min": 0.999}], ids=str)
def test_a_step_of_fake_tensors_runs_and_changes_nothing_real(options):
    with FakeTensorMode():
        p = torch.nn.Parameter(torch.empty(3, 4))
        optimizer = KourkoutasBeta([p], buckets="global", **options)
        for _ in range(2):
            p.grad = torch.empty(3, 4)
            optimizer.step()
        assert optimizer.state[p]["exp_avg"].shape == (3, 4)


def test_real_parameters_stay_as_they_are_under_a_fake_mode():
    p = parameter(1.0, 2.0)
    p.grad = torch.ones(2)
    optimizer = KourkoutasBeta([p], lr=0.1)
    optimizer.step()
    before = everything([p], optimizer)
    with FakeTensorMode(allow_non_fake_inputs=True):
        try:
            optimizer.step()
        except Exception as error:  # which one is the mode's business
            print(error)
    assert all(torch.equal(a, b) for a, b in zip(before, everything([p], optimizer), strict=True))


def test_a_step_traced_by_make_fx_trains():
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    optimizer, twin = KourkoutasBeta([p], lr=0.1), KourkoutasBeta([q], lr=0.1)
    for x, o in ((p, optimizer), (q, twin)):
        x.grad = torch.ones(2)
        o.step()

    def step(grad):
        p.grad = grad
        optimizer.step()

    graph = make_fx(step)(torch.full((2,), 2.0))  # which also takes the step
    with torch.no_grad():
        graph(torch.full((2,), 3.0))
    for scale in (2.0, 3.0):
        q.grad = torch.full((2,), scale)
        twin.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
    assert optimizer.state[p]["step"].item() == 3


# Schedulers that move β1


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.1, step_size_up=4),
    ],
    ids=["one-cycle", "cyclic"],
)
@BY_NAME
def test_schedulers_that_cycle_momentum_drive_beta1_as_they_drive_adams(make, route):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    ours = KourkoutasBeta([p], lr=0.01, beta2_min=0.999, bias_correction="exact", **route)
    adam = torch.optim.Adam([q], lr=0.01)
    pair = [make(ours), make(adam)]
    seen = set()
    for t in range(12):
        p.grad = torch.tensor([math.sin(t), 1.0])
        q.grad = p.grad.clone()
        for optimizer, scheduler in zip((ours, adam), pair, strict=True):
            optimizer.step()
            scheduler.step()
        assert ours.param_groups[0]["betas"] == adam.param_groups[0]["betas"]
        seen.add(ours.param_groups[0]["betas"][0])
    assert len(seen) > 3
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_a_beta1_written_into_a_group_is_taken_over():
    p, q = parameter(1.0), parameter(1.0)
    one, other = KourkoutasBeta([p], beta1=0.5, beta2_max=0.99), KourkoutasBeta([q])
    other.param_groups[0]["beta1"] = 0.5
    other.param_groups[0]["beta2_max"] = 0.99
    for t in range(3):
        p.grad = q.grad = torch.tensor([1.0 + t])
        one.step()
        other.step()
    assert other.param_groups[0]["betas"] == (0.5, 0.99)
    assert torch.equal(p, q)


# State


@BY_NAME
def test_parameters_without_gradients_get_no_state(route):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    model[0].requires_grad_(False)
    optimizer = KourkoutasBeta(model.parameters(), **route)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert len(optimizer.state) == 2
    assert len(optimizer.state_dict()["state"]) == 2


@pytest.mark.parametrize("options", [{}, {"decay": 1}], ids=["adam", "amsgrad"])
def test_adamw_goes_on_from_our_state(options):
    p = parameter(1.0, 2.0)
    optimizer = KourkoutasBeta([p], lr=0.1, beta2_min=0.999, weight_decay=0.1, **options)
    adam = torch.optim.AdamW([p], lr=0.5)
    p.grad = torch.ones(2)
    optimizer.step()
    adam.load_state_dict(optimizer.state_dict())
    twin = torch.nn.Parameter(p.detach().clone())
    goes_on = KourkoutasBeta([twin], lr=0.1, beta2_min=0.999, weight_decay=0.1, **options)
    goes_on.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for t in range(3):
        p.grad = torch.full((2,), 1.0 + t)
        twin.grad = p.grad.clone()
        adam.step()
        goes_on.step()
    assert adam.param_groups[0]["amsgrad"] is bool(options)
    torch.testing.assert_close(p, twin, rtol=0, atol=1e-6)


def test_a_parameter_given_twice_warns_as_adams_does_and_counts_once():
    p, q = parameter(1.0), parameter(1.0)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = KourkoutasBeta([("a", p), ("a again", p)], lr=0.1)
    assert optimizer.bucket_names == ["a"]
    once = KourkoutasBeta([q], lr=0.1)
    p.grad = q.grad = torch.ones(1)
    optimizer.step()
    once.step()
    assert torch.equal(p, q)


# Tensors among the options


@BY_NAME
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_learning_rate_tensor_of_one_element_is_a_number(route, shape):
    ps, qs = ([parameter(1.0, 2.0), parameter(3.0)] for _ in range(2))
    by_tensor = KourkoutasBeta(ps, lr=torch.full(shape, 0.125), max_ratio=3.0, **route)
    by_number = KourkoutasBeta(qs, lr=0.125, max_ratio=3.0, **route)
    for t in range(3):
        for p, q in zip(ps, qs, strict=True):
            p.grad = q.grad = torch.full_like(p, 1.0 + t)
        by_tensor.step()
        by_number.step()
    torch.testing.assert_close(ps, qs, rtol=0, atol=1e-6)


@BY_NAME
@pytest.mark.parametrize("shape", [(), (1, 1)], ids=str)
def test_betas_may_be_tensors_with_and_without_capturable(route, shape):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    beta1 = torch.full(shape, 0.75)
    by_tensor = KourkoutasBeta([p], lr=0.1, beta1=beta1, beta2_max=torch.full(shape, 0.9375), **route)
    by_number = KourkoutasBeta([q], lr=0.1, beta1=0.75, beta2_max=0.9375, **route)
    for t in range(4):
        if t == 2:
            beta1.fill_(0.5)
            by_number.param_groups[0]["betas"] = (0.5, 0.9375)
        p.grad = q.grad = torch.tensor([1.0 + t, -1.0])
        by_tensor.step()
        by_number.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_a_learning_rate_of_several_elements_is_refused_at_once():
    with pytest.raises(ValueError, match=r"`lr` must be a number or a tensor of one element; got shape \[2\]"):
        KourkoutasBeta([parameter(1.0)], lr=torch.ones(2))


# Overflow


@on_every_route
@pytest.mark.parametrize("buckets", ["parameter", "global"])
def test_finite_gradients_have_a_finite_norm(route, buckets):
    params = [torch.nn.Parameter(torch.ones(n)) for n in (1_000_000, 3)]
    optimizer = KourkoutasBeta(params, lr=0.1, buckets=buckets, **route)
    for p in params:
        p.grad = torch.full_like(p, 1e18)
    optimizer.step()
    # r = 0.07·n with n = √(10⁶)·1e18, whose square has no float32
    assert optimizer.state[params[0]]["norm_ema"].item() == pytest.approx(0.07 * 1e21, rel=1e-5)
    assert all(p.isfinite().all() for p in params)
    assert params[0][0].item() < 1


@on_every_route
def test_the_norm_of_many_entries_keeps_its_digits(route):
    p = torch.nn.Parameter(torch.zeros(4_000_000))
    p.grad = torch.rand(p.shape, generator=torch.Generator().manual_seed(0))
    optimizer = KourkoutasBeta([p], **route)
    optimizer.step()
    expected = 0.07 * p.grad.double().norm().item()
    assert optimizer.state[p]["norm_ema"].item() == pytest.approx(expected, rel=1e-6)


@on("capturable")
def test_a_device_without_float64_has_finite_norms_too(route, monkeypatch):
    from kourkoutas.torch import lists

    monkeypatch.setattr(lists, "NO_FLOAT64", ("cpu",))
    params = [torch.nn.Parameter(torch.ones(n)) for n in (1_000_000, 3, 0)]
    for buckets in ("parameter", "global"):
        optimizer = KourkoutasBeta(params, buckets=buckets, adaptive_tiny=True, **route)
        for p in params:
            p.grad = torch.full_like(p, 1e18)
        optimizer.step()
        assert optimizer.state[params[0]]["norm_ema"].item() == pytest.approx(0.07 * 1e21, rel=1e-5)


@on("plain", "foreach", "capturable", "fused", "kernel")
def test_a_second_moment_that_overflowed_stays_infinite_as_adams_does(route):
    p = parameter(1.0, 2.0)
    optimizer = KourkoutasBeta([p], lr=0.1, **route)
    for scale in (1e20, 1.0, 1.0):
        p.grad = torch.full((2,), scale)
        optimizer.step()
    assert p.isfinite().all()
    assert optimizer.state[p]["exp_avg_sq"].isinf().all()


# Nothing half done


@pytest.mark.parametrize("kind", ["sparse", "state_dtype"])
@BY_NAME
def test_a_step_that_raises_has_changed_nothing_in_any_group(route, kind):
    p, q = parameter(1.0, 2.0), parameter(1.0, 1.0)
    options = {"state_dtype": torch.bfloat16} if kind == "state_dtype" else {}
    optimizer = KourkoutasBeta([{"params": [p]}, {"params": [q], **options}], lr=0.1, **route)
    if kind == "state_dtype":
        q.data = q.data.double()
    p.grad, q.grad = torch.ones(2), torch.ones_like(q) if kind == "state_dtype" else torch.ones(2).to_sparse()
    with pytest.raises(RuntimeError, match=r"sparse|state_dtype"):
        optimizer.step()
    assert torch.equal(q, torch.ones_like(q))
    assert torch.equal(p, torch.tensor([1.0, 2.0]))
    assert q not in optimizer.state
    if p in optimizer.state:
        assert optimizer.state[p]["step"].item() == 0


@BY_NAME
def test_a_bad_learning_rate_written_later_changes_nothing(route):
    p, q = parameter(1.0), parameter(1.0)
    optimizer = KourkoutasBeta([{"params": [p]}, {"params": [q]}], **route)
    p.grad = q.grad = torch.ones(1)
    optimizer.step()
    before = everything([p, q], optimizer)
    optimizer.param_groups[1]["lr"] = torch.ones(2)
    with pytest.raises((ValueError, RuntimeError)):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything([p, q], optimizer), strict=True))


@BY_NAME
def test_a_state_of_another_shape_is_refused_before_anything_moves(route):
    p, q = parameter(1.0), parameter(1.0, 2.0)
    optimizer = KourkoutasBeta([p, q], **route)
    p.grad, q.grad = torch.ones(1), torch.ones(2)
    optimizer.step()
    optimizer.state[q]["exp_avg"] = torch.zeros(3)
    before = p.item()
    with pytest.raises(RuntimeError, match=r"`exp_avg` in the state of parameter \d has another shape"):
        optimizer.step()
    assert p.item() == before


REPLACED = {
    "shape": torch.zeros(3, 2),
    "device": torch.zeros(2, 3, device="meta"),
    "negated": torch._neg_view(torch.zeros(2, 3)),
}


@BY_NAME
@pytest.mark.parametrize("kind", REPLACED)
def test_a_replaced_state_of_the_same_size_is_refused_before_anything_moves(route, kind):
    p, q = parameter(1.0), torch.nn.Parameter(torch.ones(2, 3))
    optimizer = KourkoutasBeta([p, q], **route)
    p.grad, q.grad = torch.ones(1), torch.ones(2, 3)
    optimizer.step()
    optimizer.state[q]["exp_avg_sq"] = REPLACED[kind]
    before = everything([p], optimizer)
    with pytest.raises(
        RuntimeError, match=r"`exp_avg_sq` in the state of parameter 1 has another shape, dtype or device .* negated"
    ):
        optimizer.step()
    for x, y in zip(everything([p], optimizer), before, strict=True):
        assert torch.equal(x, y)


@BY_NAME
def test_a_state_of_another_shape_is_refused_under_a_dispatch_mode_too(route):
    p = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = KourkoutasBeta([p], **route)
    p.grad = torch.ones(2, 3)
    optimizer.step()
    optimizer.state[p]["exp_avg"] = torch.zeros(1, 3)  # which would be broadcast
    with Watch(), pytest.raises(RuntimeError, match=r"`exp_avg` in the state of parameter \d has another shape"):
        optimizer.step()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": torch.tensor(-1.0)}, r"`lr` must be a finite number >= 0, for example 1e-3; got -1.0"),
        ({"lr": torch.tensor([torch.nan])}, "`lr` must be a finite number >= 0"),
        ({"beta1": torch.tensor(1.5)}, r"`beta1` must be in \[0, 1\), for example 0.9; got 1.5"),
        ({"beta2_min": torch.tensor(0.9995)}, "`beta2_min` must not exceed `beta2_max`"),
        ({"weight_decay": torch.tensor(-0.1)}, "`weight_decay` must be a finite number >= 0"),
        ({"alpha": torch.nn.Parameter(torch.tensor(1.0))}, r"`alpha` must be in \(0, 1\)"),
    ],
    ids=str,
)
def test_a_tensor_on_the_cpu_is_checked_like_a_number(options, message):
    p = parameter(1.0)
    with pytest.raises(ValueError, match=message):
        KourkoutasBeta([p], **options)
    with pytest.raises(ValueError, match=message):
        KourkoutasBeta([{"params": [p], **options}])
    optimizer = KourkoutasBeta([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(1.0)], **options})
    p.grad = torch.ones(1)
    optimizer.param_groups[0].update(options)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert p.item() == 1


def test_a_float32_tensor_is_checked_by_the_digits_that_it_holds():
    KourkoutasBeta([parameter(1.0)], beta2_min=torch.tensor(0.999))  # 0.9990000129 in float32
    KourkoutasBeta([parameter(1.0)], beta2_min=0.999, beta2_max=torch.tensor(0.999, dtype=torch.float64))


def test_a_tensor_whose_value_cannot_be_read_passes():
    p = parameter(1.0)
    KourkoutasBeta([p], lr=torch.tensor(-1.0, device="meta"), beta1=torch.tensor(1.5, device="meta"))
    with FakeTensorMode():
        KourkoutasBeta([torch.nn.Parameter(torch.empty(2))], lr=torch.tensor(-1.0), beta1=torch.tensor(1.5))


def test_a_learning_rate_in_a_tensor_is_read_once_and_not_at_every_step():
    class Counted(TorchDispatchMode):
        reads = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Counted.reads += "_local_scalar_dense" in str(func)
            return func(*args, **(kwargs or {}))

    p = parameter(1.0)
    p.grad = torch.ones(1)
    optimizer = KourkoutasBeta([p], lr=torch.tensor(0.1), beta1=torch.tensor(0.9), fused=False)
    optimizer.step()
    with Counted():
        for _ in range(3):
            optimizer.param_groups[0]["lr"].fill_(0.05)
            optimizer.step()
    assert Counted.reads == 0


def test_an_empty_group_with_diagnostics_steps_and_has_nothing_to_tell():
    from kourkoutas.trace import Trace

    optimizer = KourkoutasBeta([{"params": []}], diagnostics=True)
    optimizer.step()
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    assert trace.beta2.shape == (1, 0)
    p = parameter(1.0)
    p.grad = torch.ones(1)
    optimizer.add_param_group({"params": [p]})
    optimizer.step()
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    assert trace.beta2.shape == (2, 1)


# Routes


def test_route_names_the_way_and_the_reason_for_each_group():
    p, q, r = parameter(1.0), parameter(1.0), parameter(1.0)
    groups = [{"params": [p]}, {"params": [q], "foreach": True}, {"params": [r], "capturable": True}]
    optimizer = KourkoutasBeta(groups)
    for x in (p, q, r):
        x.grad = torch.ones(1)
    first, second, third = optimizer.route()
    assert first.name == ("foreach" if kernel.extension is None else "kernel")
    assert (second.name, second.reason) == ("foreach", "foreach=True was asked for")
    assert (third.name, third.reason) == ("foreach", "capturable=True: scalars stay on the device")
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 1


@pytest.mark.usefixtures("no_kernel")
@pytest.mark.parametrize(
    ("options", "fused"),
    [
        ({}, True),
        ({"decay": 1, "bias_correction": "exact", "weight_decay": 0.1}, True),
        ({"decay": 0.98}, False),
        ({"nonfinite": "skip", "diagnostics": True}, True),
        ({"buckets": "global"}, True),
        ({"adaptive_tiny": True}, False),
        ({"max_ratio": 3.0}, False),
        ({"state_dtype": torch.bfloat16}, False),
        ({"capturable": True}, False),
    ],
    ids=str,
)
def test_without_the_kernel_torchs_fused_adam_does_the_elementwise_part_where_it_can(options, fused):
    p = parameter(1.0, 2.0)
    p.grad = torch.ones(2)
    (route,) = KourkoutasBeta([p], **options).route()
    assert (route.name, route.fused) == ("foreach", fused)


@pytest.mark.usefixtures("no_kernel")
def test_without_the_kernel_the_route_says_why():
    p = parameter(1.0, 2.0)
    p.grad = torch.ones(2)
    assert KourkoutasBeta([p]).route()[0].reason == "the C kernel is not there: it was turned off"


@pytest.mark.parametrize("name", [pytest.param("is_neg", marks=pytest.mark.slow), "is_conj"])
def test_a_torch_that_does_not_answer_about_lazy_bits_has_no_kernel_and_the_route_says_so(name):
    script = f"""
    import torch
    method = torch.Tensor.{name}
    torch.Tensor.{name} = lambda self: method(self)
    from kourkoutas.torch import KourkoutasBeta
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    optimizer = KourkoutasBeta([p])
    optimizer.step()
    print(optimizer.route()[0].reason, p[0].item() < 1)
    """
    if kernel.extension is None:
        pytest.skip("the C kernel was not built")
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert "the C kernel is not there: this torch does not let it ask" in done.stdout, done.stderr
    assert "True" in done.stdout


@on("kernel")
def test_the_kernel_takes_complex_tensors_beside_others(route):
    p, z = parameter(1.0, 2.0), torch.nn.Parameter(torch.tensor([1 + 2j]))
    optimizer = KourkoutasBeta([p, z], buckets="global", **route)
    p.grad, z.grad = torch.ones(2), torch.ones(1, dtype=z.dtype)
    assert optimizer.route()[0].name == "kernel"
    z.grad = torch.full((1,), 3 + 4j).conj()
    assert optimizer.route()[0].name == "foreach"


@BY_NAME
def test_max_ratio_bounds_each_part_of_a_complex_number(route):
    z = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex128))
    pair = torch.nn.Parameter(torch.zeros(1, 2, dtype=torch.float64))
    options = {"lr": 0.1, "beta1": 0.0, "max_ratio": 0.5, "bias_correction": "none"}
    ours, real = (KourkoutasBeta([x], **options, **route) for x in (z, pair))
    for t in range(5):
        z.grad = torch.tensor([1000 - (t + 1) * 1e-3j], dtype=z.dtype)
        pair.grad = torch.view_as_real(z.grad).clone()
        ours.step()
        real.step()
    torch.testing.assert_close(torch.view_as_real(z.detach()), pair.detach(), rtol=0, atol=1e-12)
    assert (z.real.item(), z.imag.item()) == pytest.approx((-0.25, 0.25))  # 5 steps at the bound, 0.1·0.5


def test_a_default_device_is_not_a_mode_that_watches():
    p = parameter(1.0, 2.0)
    p.grad = torch.ones(2)
    with torch.device("cpu"):
        (route,) = KourkoutasBeta([p]).route()
    assert route.reason != "the step is being traced by torch.compile, or a torch mode or transform watches it"


def test_groups_of_one_step_may_go_different_ways_and_share_one_trace():
    from kourkoutas.trace import Trace

    a, b, c = parameter(1.0, 2.0), parameter(1.0, 2.0), parameter(1.0)
    groups = [{"params": [("a", a)]}, {"params": [("b", b)], "foreach": True}, {"params": [("c", c)]}]
    optimizer = KourkoutasBeta(groups, diagnostics=True)
    for t in range(3):
        a.grad = b.grad = torch.tensor([1.0 + t, 2.0])
        c.grad = torch.ones(1) if t == 1 else None
        optimizer.step()
    assert {route.name for route in optimizer.route()} >= {"foreach"}
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    assert trace.steps.tolist() == [1, 2, 3]
    torch.testing.assert_close(torch.tensor(trace.beta2[:, 0]), torch.tensor(trace.beta2[:, 1]), rtol=0, atol=1e-6)
    assert [bool(x) for x in torch.tensor(trace.beta2[:, 2]).isnan()] == [True, False, True]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({torch.nn.Parameter(torch.ones(2))}, "ordered collections"),
        ("weights", "one of the params is str"),
        (7, "not iterable"),
    ],
    ids=["set", "text", "number"],
)
def test_parameters_that_are_no_list_of_tensors_are_refused(params, message):
    with pytest.raises(TypeError, match=message):
        KourkoutasBeta([{"params": params}])


def test_a_lone_tensor_is_a_group_of_one():
    optimizer = KourkoutasBeta([{"params": torch.nn.Parameter(torch.ones(2))}])
    assert len(optimizer.param_groups[0]["params"]) == 1


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        ([], TypeError),
        ({"lr": 0.1}, KeyError),
        ({"params": torch.ones(3), "buckets": "module"}, ValueError),
        ({"params": torch.ones(3), "alpha": 2.0}, ValueError),
        ({"params": torch.ones(3, dtype=torch.float64), "state_dtype": torch.bfloat16}, RuntimeError),
        ({"params": torch.ones(3), "buckets": lambda name, tensor: []}, TypeError),
    ],
    ids=["list", "no params", "no names", "option", "dtype", "key"],
)
def test_a_group_that_does_not_fit_is_refused_and_nothing_is_added(group, kind):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = KourkoutasBeta([p])
    with pytest.raises(kind):
        optimizer.add_param_group(group)
    p.grad = torch.ones(2)
    optimizer.step()
    assert len(optimizer.param_groups) == 1
    assert optimizer.bucket_names == ["param_0"]


def test_a_group_is_a_copy_of_what_was_given():
    group = {"params": [torch.nn.Parameter(torch.ones(2))], "buckets": lambda name, tensor: "all"}
    for _ in range(2):
        assert KourkoutasBeta([group]).bucket_names == ["all"]
    assert set(group) == {"params", "buckets"}


def test_fused_needs_a_device_that_has_a_kernel():
    p = torch.nn.Parameter(torch.ones(2, device="meta"))
    with pytest.raises(
        RuntimeError, match=r"`fused=True` needs floating-point parameters .* on meta: use foreach=True"
    ):
        KourkoutasBeta([p], fused=True)
