"""What users of torch.optim expect of an optimizer."""

import warnings

import numpy as np
import pytest
import torch

from kourkoutas import Hyper, NonFiniteGradient
from kourkoutas.oracle import Oracle
from kourkoutas.torch import KourkoutasBeta
from kourkoutas.trace import WINDOW, Trace
from tests.torch_frontend.routes import on, on_every_route


def parameter(*values, dtype=torch.float32):
    return torch.nn.Parameter(torch.tensor(values, dtype=dtype))


def set_grads(params, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = (scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(p.dtype)


def test_each_group_has_its_own_hyper_parameters():
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    slow = {"params": [q], "lr": 1e-3, "beta1": 0.5, "beta2_min": 0.5, "alpha": 0.8, "decay": 1, "max_ratio": 0.5}
    optimizer = KourkoutasBeta([{"params": [p]}, slow], lr=1e-2, weight_decay=0.1)
    options = {k: v for k, v in slow.items() if k not in ("params", "lr")}
    oracles = [
        Oracle({"p": [1.0, 2.0]}, Hyper(weight_decay=0.1), lr=1e-2),
        Oracle({"p": [1.0, 2.0]}, Hyper(weight_decay=0.1, **options), lr=1e-3),
    ]
    for t in range(10):
        set_grads([p, q], t)
        optimizer.step()
        for x, oracle in zip((p, q), oracles, strict=True):
            oracle.step({"p": x.grad.numpy()})
    for x, oracle in zip((p, q), oracles, strict=True):
        np.testing.assert_allclose(x.detach().numpy(), oracle.params["p"], atol=2e-6)


@on_every_route
def test_maximize_is_minimize_of_the_negative(route):
    p, q = parameter(1.0, -1.0), parameter(1.0, -1.0)
    up, down = KourkoutasBeta([p], maximize=True, **route), KourkoutasBeta([q], **route)
    for t in range(5):
        set_grads([p], t)
        q.grad = -p.grad
        up.step()
        down.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_tensor_learning_rate_is_followed(capturable):
    p, q = parameter(1.0, -1.0), parameter(1.0, -1.0)
    lr = torch.tensor(0.5)
    by_tensor = KourkoutasBeta([p], lr=lr, capturable=capturable)
    by_float = KourkoutasBeta([q], lr=0.5)
    for t in range(6):
        if t == 3:
            lr.fill_(0.125)
            by_float.param_groups[0]["lr"] = 0.125
        set_grads([p, q], t)
        q.grad = p.grad.clone()
        by_tensor.step()
        by_float.step()
    torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")  # SequentialLR of torch 2.8 warns of itself
@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10, cycle_momentum=False),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            milestones=[3],
        ),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    ],
    ids=["step", "cosine", "one-cycle", "sequential", "plateau"],
)
def test_learning_rate_schedulers_drive_it(make):
    p = parameter(1.0, -1.0)
    optimizer = KourkoutasBeta([p], lr=0.05)
    scheduler = make(optimizer)
    oracle = Oracle({"p": [1.0, -1.0]})
    rates = set()
    for t in range(9):
        set_grads([p], t)
        oracle.lr = optimizer.param_groups[0]["lr"]
        rates.add(oracle.lr)
        oracle.step({"p": p.grad.numpy()})
        optimizer.step()
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        else:
            scheduler.step()
    assert len(rates) > 1
    np.testing.assert_allclose(p.detach().numpy(), oracle.params["p"], atol=2e-6)


def test_a_closure_is_evaluated_with_gradients_and_its_loss_returned():
    p = parameter(3.0)
    optimizer = KourkoutasBeta([p], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 9.0
    assert p.item() < 3.0


def test_the_profiler_sees_the_step():
    p = parameter(1.0)
    p.grad = torch.ones_like(p)
    optimizer = KourkoutasBeta([p])
    with torch.autograd.profiler.profile() as profile:
        optimizer.step()
    assert [e.name for e in profile.function_events].count("Optimizer.step#KourkoutasBeta.step") == 1


@on_every_route
def test_complex_parameters_are_updated_as_pairs_of_reals(route):
    z = torch.nn.Parameter(torch.tensor([1 + 2j, -0.5j], dtype=torch.complex128))
    oracle = Oracle({"z": torch.view_as_real(z.detach()).numpy()}, Hyper(decay=0.98, adaptive_tiny=True), lr=1e-2)
    optimizer = KourkoutasBeta([z], lr=1e-2, decay=0.98, adaptive_tiny=True, **route)
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        z.grad = torch.randn(2, dtype=torch.complex128, generator=generator)
        oracle.step({"z": torch.view_as_real(z.grad).numpy()})
        optimizer.step()
    np.testing.assert_allclose(torch.view_as_real(z.detach()).numpy(), oracle.params["z"], atol=1e-12)


@on_every_route
def test_odd_shapes_and_layouts_are_updated_in_place(route):
    params = [
        torch.nn.Parameter(torch.tensor(1.5)),
        torch.nn.Parameter(torch.zeros(0, 3)),
        torch.nn.Parameter(torch.arange(12.0).view(3, 4).t()),
        torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)),
    ]
    start = {str(i): p.detach().numpy().copy() for i, p in enumerate(params)}
    oracle = Oracle(start, Hyper(adaptive_tiny=True), lr=1e-2)
    optimizer = KourkoutasBeta(params, lr=1e-2, adaptive_tiny=True, **route)
    strides = [p.stride() for p in params]
    for t in range(5):
        set_grads(params, t)
        params[2].grad = params[2].grad.clone(memory_format=torch.contiguous_format)
        optimizer.step()
        oracle.step({str(i): p.grad.numpy() for i, p in enumerate(params)})
    assert strides == [p.stride() for p in params]
    for i, p in enumerate(params):
        np.testing.assert_allclose(p.detach().numpy(), oracle.params[str(i)], atol=2e-6)


@on_every_route
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_round_once_per_step(route, dtype):
    p = torch.nn.Parameter(torch.linspace(0.5, 2, 16).to(dtype))
    optimizer = KourkoutasBeta([p], lr=1e-2, eps=1e-4, decay=0.98, **route)
    for t in range(6):
        set_grads([p], t)
        before = {k: v.double().numpy() for k, v in optimizer.state[p].items()} if optimizer.state[p] else None
        oracle = Oracle({"p": p.detach().double().numpy()}, Hyper(eps=1e-4, decay=0.98), lr=1e-2)
        if before:
            oracle.m["p"], oracle.v["p"], oracle.v_max["p"] = (
                before["exp_avg"],
                before["exp_avg_sq"],
                before["max_exp_avg_sq"],
            )
            oracle.t["p"], oracle.r["p"] = int(before["step"]), float(before["norm_ema"])
        oracle.step({"p": p.grad.double().numpy()})
        optimizer.step()
        ulp = torch.finfo(dtype).eps
        np.testing.assert_allclose(p.detach().double().numpy(), oracle.params["p"], rtol=ulp)


@on_every_route
def test_mixed_dtypes_share_one_bucket_with_one_norm(route):
    params = [torch.nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float64)]
    optimizer = KourkoutasBeta(params, buckets="global", alpha=0.5, **route)
    for p in params:
        p.grad = torch.full_like(p, 2.0)
    optimizer.step()
    # n = √(9·4) = 6 and r = ½·n
    assert optimizer.state[params[0]]["norm_ema"].item() == pytest.approx(3.0, rel=1e-15)


def test_a_frozen_layer_is_untouched_and_a_bucket_without_gradients_keeps_its_average():
    p, q = parameter(1.0), parameter(1.0)
    optimizer = KourkoutasBeta([p, q])
    set_grads([p, q], 0)
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state[q].items()} | {"theta": q.detach().clone()}
    for t in range(1, 4):
        set_grads([p], t)
        q.grad = None
        optimizer.step()
    after = optimizer.state[q] | {"theta": q.detach()}
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert optimizer.state[p]["step"].item() == 4


def test_a_step_without_any_gradient_does_nothing():
    p = parameter(1.0)
    optimizer = KourkoutasBeta([p], diagnostics=True)
    optimizer.step()
    assert p.item() == 1.0


def test_sparse_gradients_are_refused_with_a_remedy():
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3).to_sparse()
    with pytest.raises(RuntimeError, match="SparseAdam"):
        KourkoutasBeta([p]).step()


def test_a_step_skipped_by_grad_scaler_changes_nothing():
    p = parameter(1.0, 2.0)
    optimizer = KourkoutasBeta([p], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t in range(4):
        optimizer.zero_grad()
        loss = (p * (torch.inf if t == 2 else 1.0)).sum()
        before = {k: v.clone() for k, v in optimizer.state[p].items()}
        kept = p.detach().clone()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if t == 2:
            assert torch.equal(p, kept)
            assert all(torch.equal(optimizer.state[p][k], v) for k, v in before.items())
        else:
            assert not torch.equal(p, kept)
    assert optimizer.state[p]["step"].item() == 3


@on_every_route
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_skip_leaves_the_bucket_exactly_as_it_was_and_goes_on(route, bad):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    options = {"decay": 0.98, "bias_correction": "exact", "weight_decay": 0.1, "nonfinite": "skip"}
    optimizer = KourkoutasBeta([p, q], lr=0.1, **options, **route)
    oracle = Oracle({"p": [1.0, 2.0], "q": [1.0, 2.0]}, Hyper(**options), lr=0.1)
    for t in range(6):
        set_grads([p, q], t)
        if t in (0, 3):
            p.grad[1] = bad
        before = {k: v.clone() for k, v in optimizer.state[p].items()} | {"theta": p.detach().clone()}
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            oracle.step({"p": p.grad.numpy(), "q": q.grad.numpy()})
        if t == 3:
            after = optimizer.state[p] | {"theta": p.detach()}
            assert all(torch.equal(before[k], after[k]) for k in before if k != "skipped")
    assert optimizer.state[p]["skipped"].item() == oracle.skipped["p"] == 2
    assert optimizer.state[q]["skipped"].item() == 0
    for name, x in (("p", p), ("q", q)):
        np.testing.assert_allclose(x.detach().numpy(), oracle.params[name], atol=2e-6)


@on("kernel", "fused", "plain", "foreach")
def test_raise_names_the_bucket_and_changes_nothing_in_any_group(route):
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    groups = [{"params": [("first", p)]}, {"params": [("second", q)]}]
    optimizer = KourkoutasBeta(groups, nonfinite="raise", **route)
    set_grads([p, q], 0)
    optimizer.step()
    before = [{k: v.clone() for k, v in optimizer.state[x].items()} | {"theta": x.detach().clone()} for x in (p, q)]
    q.grad[0] = torch.nan
    with pytest.raises(NonFiniteGradient, match="'second'"):
        optimizer.step()
    for x, kept in zip((p, q), before, strict=True):
        now = optimizer.state[x] | {"theta": x.detach()}
        assert all(torch.equal(kept[k], now[k]) for k in kept)


def test_propagate_loses_the_whole_bucket_to_one_nan_where_adam_loses_the_entry():
    p, q = parameter(1.0, 2.0), parameter(1.0, 2.0)
    p.grad, q.grad = torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0])
    KourkoutasBeta([p]).step()
    torch.optim.Adam([q]).step()
    assert p.isnan().tolist() == [True, True]  # the pooled norm is NaN, and with it β2 of the whole bucket
    assert q.isnan().tolist() == [True, False]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # raised by torch's own imports
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}], ids=["default", "full"]
)
def test_a_compiled_step_equals_eager_and_is_compiled_once(foreach, options):
    torch._dynamo.reset()
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    ps, qs = [[parameter(1.0, -2.0, 3.0), parameter(0.5)] for _ in range(2)]
    options = {"buckets": "shape", "warmup_steps": 3, **options}
    eager = KourkoutasBeta(ps, lr=1e-2, foreach=foreach, **options)
    lr = torch.tensor(1e-2)
    compiled = KourkoutasBeta(qs, lr=lr, foreach=foreach, **options)
    step = torch.compile(compiled.step, backend=backend)
    for t in range(8):
        scale = 100.0 if t == 5 else 1.0
        set_grads(ps, t, scale)
        set_grads(qs, t, scale)
        if t == 6:
            lr.fill_(2e-2)
            eager.param_groups[0]["lr"] = 2e-2
        eager.step()
        step()
        if t == 1:
            early = len(compiles)
    assert len(compiles) == early == 1, "the step must be one graph, compiled once"
    for p, q in zip(ps, qs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-6)


def test_the_trace_holds_what_the_oracle_computes():
    p, q = parameter(1.0, 2.0, 3.0), parameter(0.5)
    optimizer = KourkoutasBeta([("w", p), ("b", q)], diagnostics=True, warmup_steps=2)
    oracle = Oracle({"w": [1.0, 2.0, 3.0], "b": [0.5]}, Hyper(warmup_steps=2))
    trace = Trace(optimizer.bucket_names)
    for t in range(6):
        set_grads([p, q], t)
        if t == 4:
            q.grad = None
        optimizer.step()
        oracle.step({"w": p.grad.numpy(), "b": None if q.grad is None else q.grad.numpy()})
    optimizer.pull(trace)
    assert trace.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.isnan(trace.beta2[4, 1])
    assert trace.snapshot()["w"]["beta2"] == pytest.approx(oracle.beta2["w"], abs=1e-6)
    assert trace.snapshot()["b"]["sun"] == pytest.approx(oracle.sun["b"], abs=1e-6)
    assert trace.beta2[:2, 0] == pytest.approx(0.9395)


def test_the_trace_loses_nothing_when_pulled_once_per_window():
    p = parameter(1.0)
    optimizer = KourkoutasBeta([p], diagnostics=True)
    trace = Trace(optimizer.bucket_names)
    p.grad = torch.ones(1)
    for t in range(1, WINDOW + 51):
        optimizer.step()
        if t in (WINDOW, WINDOW + 50):
            optimizer.pull(trace)
    assert trace.lost == 0
    assert len(trace.steps) == WINDOW + 50


BAD_CALLS = [
    (lambda p: KourkoutasBeta([p], lr=-1.0), ValueError, r"`lr`.*-1\.0"),
    (lambda p: KourkoutasBeta([p], beta1=1.0), ValueError, "`beta1`"),
    (lambda p: KourkoutasBeta([p], buckets="layers"), ValueError, "`buckets`.*'layers'"),
    (lambda p: KourkoutasBeta([p], bias_correction="yes"), ValueError, "`bias_correction`.*'yes'"),
    (lambda p: KourkoutasBeta([{"params": [p]}, {"params": [p]}]), ValueError, "more than one parameter group"),
    (lambda p: KourkoutasBeta([3.0]), TypeError, "one of the params is float"),
    (lambda p: KourkoutasBeta(p), TypeError, "iterable of Tensors or dicts"),
    (lambda p: KourkoutasBeta([]), ValueError, "empty"),
    (lambda p: KourkoutasBeta([p], buckets="module"), ValueError, "named_parameters"),
    (lambda p: KourkoutasBeta([p], fused=True, foreach=True), ValueError, "`fused` and `foreach`"),
    (lambda p: KourkoutasBeta([p], capturable=True, nonfinite="raise"), ValueError, "`nonfinite`"),
    (lambda p: KourkoutasBeta([p], maximize="yes"), TypeError, "`maximize`"),
    (lambda p: KourkoutasBeta([{"params": [p], "alpha": 2.0}]), ValueError, "`alpha`.*2"),
    (lambda p: KourkoutasBeta([p * 1.0]), ValueError, "non-leaf"),
]


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS, ids=[m for *_, m in BAD_CALLS])
def test_bad_input_gets_one_error_that_names_it(call, kind, message):
    with pytest.raises(kind, match=message):
        call(parameter(1.0))


def test_a_refused_group_leaves_the_optimizer_as_it_was():
    p, q = parameter(1.0), parameter(2.0)
    optimizer = KourkoutasBeta([p])
    for group in ({"params": [q], "decay": 7}, {"params": [p]}, {"params": [q], "betas": 0.9}):
        with pytest.raises(ValueError, match=r"`decay`|`betas`|more than one"):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    assert optimizer.bucket_names == ["param_0"]


def test_a_bad_value_set_in_a_group_later_is_refused_at_the_step():
    p = parameter(1.0)
    optimizer = KourkoutasBeta([p])
    optimizer.param_groups[0]["alpha"] = 1.5
    p.grad = torch.ones(1)
    with pytest.raises(ValueError, match=r"`alpha`.*1\.5"):
        optimizer.step()
    assert p.item() == 1.0
