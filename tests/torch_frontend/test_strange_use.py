"""What a stranger may do to an optimizer: odd tensors, edited groups, cleared state, hooks, threads.

Each test is of a defect that was found by trying.
"""

import copy
import pickle
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

from kourkoutas.rule import NonFiniteGradient
from kourkoutas.torch import KourkoutasBeta, kernel
from kourkoutas.trace import Trace
from tests.torch_frontend.routes import on

EVERYWHERE = on("kernel", "fused", "plain", "foreach", "capturable")


def alive(script: str) -> str:
    """What a script prints in a process of its own, which must end well."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def ones(*shape, **options):
    return torch.nn.Parameter(torch.ones(*shape, **options))


def stepped(params, **options):
    """An optimizer that has made one step on gradients of ones."""
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = KourkoutasBeta(params, **options)
    optimizer.step()
    return optimizer


# The kernel


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_nan_in_short_parameters_stays_within_them(dtype):
    if kernel.extension is None:
        pytest.skip("needs the C kernel")
    script = f"""
    import torch
    from kourkoutas.torch import KourkoutasBeta
    p = torch.nn.Parameter(torch.ones(1000, dtype=torch.{dtype}))
    optimizer = KourkoutasBeta([p], adaptive_tiny=True)
    assert optimizer.route()[0].name == "kernel"
    for _ in range(3):
        p.grad = torch.full_like(p, float("nan"))
        optimizer.step()
    print(int(p.isnan().sum()))
    """
    assert alive(script).strip() == "1000"


@EVERYWHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_one_nan_with_adaptive_tiny_makes_the_parameter_nan(route, dtype):
    p = ones(100, dtype=dtype)
    p.data[3] = torch.nan
    p.grad = torch.ones_like(p)
    KourkoutasBeta([p], adaptive_tiny=True, **route).step()
    assert p.isnan().all()


@EVERYWHERE
def test_a_number_held_with_a_negative_bit_counts_with_its_sign(route):
    p, q = ones(3), ones(3)
    for x, held in ((p, torch._neg_view), (q, torch.neg)):
        optimizer = stepped([x], **route)
        optimizer.state[x]["norm_ema"] = held(optimizer.state[x]["norm_ema"])
        optimizer.step()
    assert torch.equal(p, q)


def test_two_threads_that_step_one_optimizer_do_not_crash_the_process():
    script = """
    import threading, torch
    from kourkoutas.torch import KourkoutasBeta
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(300)]
    optimizer = KourkoutasBeta(params)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    threads = [threading.Thread(target=lambda: [optimizer.step() for _ in range(100)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(all(bool(p.isfinite().all()) for p in params))
    """
    assert alive(script).strip() == "True"


def test_a_failed_step_says_why_when_the_kernel_was_turned_off_meanwhile(monkeypatch):
    p = ones(3)
    optimizer = stepped([p])
    monkeypatch.setattr(kernel, "extension", None)
    assert optimizer.route()[0].name == "foreach"
    optimizer.state[p]["exp_avg"] = torch.zeros(4)
    with pytest.raises(RuntimeError, match="another shape"):
        optimizer.step()


# A fixed β2: Adam

LAYOUTS = {
    "transposed gradient": lambda p: torch.randn(p.shape[::-1]).t(),
    "strided gradient": lambda p: torch.randn(p.shape[0], 2 * p.shape[1])[:, ::2],
    "expanded gradient": lambda p: torch.randn(p.shape[0], 1).expand(p.shape),
    "negated gradient": lambda p: torch._neg_view(torch.randn(p.shape)),
    "zero gradient": lambda p: torch._efficientzerotensor(p.shape),
}


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_a_fixed_beta2_any_layout_of_the_gradient_gives_adams_step(layout, fused):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(4, 5))
    q = torch.nn.Parameter(p.detach().clone())
    ours = KourkoutasBeta([p], lr=0.1, beta2_min=0.999, fused=fused)
    adam = torch.optim.AdamW([q], lr=0.1, weight_decay=0)
    for _ in range(3):
        p.grad = LAYOUTS[layout](p)
        q.grad = p.grad.clone().contiguous()
        ours.step()
        adam.step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_with_a_fixed_beta2_only_the_parameter_moves_of_a_larger_tensor():
    base = torch.zeros(4, 6)
    p = torch.nn.Parameter(base[:, ::2])
    p.grad = torch.ones(4, 3)
    KourkoutasBeta([p], lr=0.1, beta2_min=0.999).step()
    assert (base[:, ::2] != 0).all()
    assert (base[:, 1::2] == 0).all()


# State


@EVERYWHERE
def test_a_cleared_state_starts_afresh(route):
    p = ones(3)
    optimizer = KourkoutasBeta([p], **route)
    p.grad = torch.full((3,), 1e3)
    optimizer.step()
    optimizer.state.clear()
    p.grad = torch.ones(3)
    optimizer.step()
    fresh = stepped([ones(3)], **route)
    assert torch.equal(optimizer.state[p]["norm_ema"], next(iter(fresh.state.values()))["norm_ema"])


@EVERYWHERE
def test_a_parameter_that_gets_a_gradient_later_joins_its_bucket(route):
    p, q = ones(3), ones(3)
    optimizer = KourkoutasBeta([p, q], buckets="global", **route)
    p.grad = torch.ones(3)
    optimizer.step()
    q.grad = torch.ones(3)
    optimizer.step()
    assert optimizer.state[p]["norm_ema"] is optimizer.state[q]["norm_ema"]


def adams_step(**options):
    """The third step of K-β after 2,000 of Adam, on a gradient of 1: Adam's is the learning rate."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    adam = torch.optim.AdamW([p], lr=1.0, weight_decay=0)
    p.grad = torch.ones_like(p)
    for _ in range(2000):
        adam.step()
    optimizer = KourkoutasBeta([p], lr=1.0, **options)
    optimizer.load_state_dict(adam.state_dict())
    for _ in range(3):
        before = p.item()
        optimizer.step()
    return before - p.item()


@pytest.mark.parametrize("beta2_min", [0.88, 0.999])
def test_an_adam_state_goes_on_with_exact_correction(beta2_min):
    assert adams_step(bias_correction="exact", beta2_min=beta2_min) == pytest.approx(1, abs=1e-6)


@EVERYWHERE
def test_exact_correction_asked_for_later_goes_on_from_the_steps_taken(route):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = KourkoutasBeta([p], lr=1.0, beta2_min=0.999, decay=0.5, **route)
    p.grad = torch.ones(1)
    for _ in range(5):
        optimizer.step()
    optimizer.param_groups[0]["bias_correction"] = "exact"
    before = p.item()
    optimizer.step()
    assert before - p.item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("step", [1, torch.tensor(1, dtype=torch.int64), torch.tensor(1.0, dtype=torch.bfloat16)])
@pytest.mark.parametrize("options", [{}, {"beta2_min": 0.999}, {"fused": False}])
def test_a_step_count_of_any_dtype_is_loaded(step, options):
    p = ones(3)
    optimizer = stepped([p], **options)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = step
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["step"].dtype == torch.float32
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 2


@EVERYWHERE
def test_a_step_count_with_one_axis_is_taken(route):
    p = ones(3)
    optimizer = stepped([p], **route)
    optimizer.state[p]["step"] = torch.ones(1)
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 2


# Nothing half done


@on("kernel", "fused", "plain", "foreach", "capturable")
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"beta2_min": 0.999}])
def test_a_changed_dtype_is_refused_before_anything_moves(route, options):
    module = torch.nn.Module()
    module.p = ones(3)
    optimizer = stepped([module.p], lr=0.1, **route, **options)
    module.double()
    module.p.grad = torch.ones(3, dtype=torch.float64)
    before = [module.p.detach().clone(), *(x.clone() for x in optimizer.state[module.p].values())]
    with pytest.raises(RuntimeError, match="another shape, dtype or device"):
        optimizer.step()
    after = [module.p.detach(), *optimizer.state[module.p].values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@EVERYWHERE
def test_a_gradient_of_the_shape_before_is_refused_before_anything_moves(route):
    p = ones(3)
    optimizer = stepped([p], lr=0.1, weight_decay=0.1, **route)
    p.data = torch.ones(5)
    for name in ("exp_avg", "exp_avg_sq"):
        optimizer.state[p][name] = torch.zeros(5)
    with pytest.raises(RuntimeError, match="`grad` of parameter 0 has another shape"):
        optimizer.step()
    assert optimizer.state[p]["step"].item() == 1
    assert torch.equal(p.detach(), torch.ones(5))


@on("plain", "foreach")
def test_a_state_made_in_inference_mode_is_refused_outside_before_anything_moves(route):
    p = ones(3)
    optimizer = KourkoutasBeta([p], **route)
    p.grad = torch.ones(3)
    with torch.inference_mode():
        optimizer.step()
    with pytest.raises(RuntimeError, match="made in inference mode"):
        optimizer.step()
    assert optimizer.state[p]["step"].item() == 1


@EVERYWHERE
def test_a_scalar_that_cannot_be_read_stops_the_step_before_any_group_moves(route):
    a, b = ones(3), ones(3)
    a.grad, b.grad = torch.ones(3), torch.ones(3)
    optimizer = KourkoutasBeta([{"params": [a]}, {"params": [b]}], **route)
    optimizer.step()
    optimizer.state[b]["step"] = torch.ones(2)
    before = a.detach().clone()
    with pytest.raises(RuntimeError, match="`step` in the state must be a tensor of one element"):
        optimizer.step()
    assert torch.equal(a.detach(), before)
    assert optimizer.state[a]["step"].item() == 1


@EVERYWHERE
def test_a_scalar_of_another_dtype_is_taken(route):
    p = ones(3)
    optimizer = stepped([p], **route)
    optimizer.state[p]["step"] = optimizer.state[p]["step"].bfloat16()
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 2


# Numbers


@on("kernel", "fused", "plain", "foreach")
def test_short_parameters_with_weight_decay_are_rounded_once(route):
    torch.manual_seed(0)
    start = torch.randn(500).bfloat16()
    grads = [torch.randn(500).bfloat16() for _ in range(20)]
    p, q = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    ours = KourkoutasBeta([p], lr=1e-2, weight_decay=0.3, **route)
    plain = KourkoutasBeta([q], lr=1e-2, weight_decay=0.3, foreach=False, fused=False)
    for g in grads:
        p.grad = q.grad = g
        ours.step()
        plain.step()
    assert (p != q).float().mean() < 0.05


@EVERYWHERE
@pytest.mark.parametrize("options", [{}, {"decay": 1}, {"nonfinite": "skip"}], ids=str)
def test_parameters_with_weight_decay_are_rounded_once_per_step(route, options):
    generator = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(1 + torch.rand(300_000, generator=generator))
    p.grad = torch.randn(300_000, generator=generator)
    optimizer = KourkoutasBeta([p], lr=1e-3, weight_decay=0.1, **options, **route)
    optimizer.step()
    p.grad = torch.randn(300_000, generator=generator)  # so that the steps differ from entry to entry
    before = p.detach().double()
    optimizer.step()
    state = optimizer.state[p]
    m, v = state["exp_avg"].double(), state.get("max_exp_avg_sq", state["exp_avg_sq"]).double()
    a1, b2 = 1 - 0.9**2, 1 - 0.999**2
    delta = 1e-3 / a1 * m / ((v / b2).sqrt() + 1e-8)
    exact = before - (1e-3 * 0.1 * before + delta)
    assert (p.detach() != exact.float()).float().mean() < 0.01  # rounded twice, every fourth differs


@EVERYWHERE
def test_an_infinite_norm_is_recorded_as_infinite(route):
    p, q = ones(3), ones(3)
    optimizer = KourkoutasBeta([p, q], buckets="global", diagnostics=True, **route)
    p.grad, q.grad = torch.full((3,), torch.inf), torch.ones(3)
    optimizer.step()
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    assert trace.norm[0, 0] == torch.inf
    assert optimizer.state[p]["norm_ema"].item() == torch.inf


def test_a_default_device_at_import_changes_nothing():
    script = """
    import torch
    torch.set_default_device("meta")
    from kourkoutas.torch import KourkoutasBeta, kernel
    torch.set_default_device(None)
    kernel.extension = None
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    KourkoutasBeta([p], lr=0.1).step()
    print(bool((p < 1).all()))
    """
    assert alive(script).strip() == "True"


def test_a_default_device_at_a_step_changes_nothing():
    p, q = ones(3), ones(3)
    p.grad, q.grad = torch.ones(3), torch.ones(3)
    optimizer = KourkoutasBeta([p, q], capturable=True, buckets="global")
    with torch.device("meta"):
        optimizer.step()
    assert (p < 1).all()


# Groups and names


def test_groups_keep_their_buckets_when_another_is_removed():
    a, b = [ones(2), ones(2)], [ones(2), ones(2)]
    optimizer = KourkoutasBeta([{"params": a, "buckets": "global"}, {"params": b}])
    for x in a + b:
        x.grad = torch.ones(2)
    optimizer.step()
    del optimizer.param_groups[0]
    b[0].grad = torch.full((2,), 1e3)
    optimizer.step()
    assert optimizer.bucket_names == ["param_2", "param_3"]
    assert optimizer.state[b[0]]["norm_ema"].item() > 90
    assert optimizer.state[b[1]]["norm_ema"].item() < 1


def test_groups_in_another_order_keep_their_buckets():
    a, b = [ones(2), ones(2), ones(2)], [ones(2)]
    optimizer = KourkoutasBeta([{"params": a, "buckets": "global"}, {"params": b}])
    for x in a + b:
        x.grad = torch.ones(2)
    optimizer.step()
    optimizer.param_groups.reverse()
    optimizer.step()
    assert optimizer.bucket_names == ["param_3", "all"]
    assert optimizer.state[a[0]]["norm_ema"] is optimizer.state[a[2]]["norm_ema"]


def test_a_parameter_put_into_a_group_by_hand_is_refused_with_the_remedy():
    p, q = ones(2), ones(2)
    optimizer = stepped([p])
    optimizer.param_groups[0]["params"].append(q)
    q.grad = torch.ones(2)
    with pytest.raises(RuntimeError, match="add_param_group"):
        optimizer.step()


def test_two_parameters_of_one_name_have_buckets_of_their_own():
    a, b = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(3, 3, bias=False)
    both = [*a.named_parameters(), *b.named_parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = KourkoutasBeta(both)
        assert optimizer.bucket_names == ["weight", "weight#2"]
        with pytest.raises(ValueError, match="two parameters are named 'weight'"):
            KourkoutasBeta(both, buckets="module")


def test_rows_recorded_before_a_group_was_added_are_kept():
    p, q = ones(2), ones(2)
    optimizer = KourkoutasBeta([p], diagnostics=True)
    p.grad, q.grad = torch.ones(2), torch.ones(2)
    for _ in range(5):
        optimizer.step()
    optimizer.add_param_group({"params": [q]})
    optimizer.step()
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    assert trace.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.tensor(trace.norm[:5, 1]).isnan().all()
    assert trace.norm[5].tolist() == pytest.approx([2**0.5, 2**0.5])


@pytest.mark.parametrize("order", [1, -1])
def test_of_groups_on_two_devices_the_trace_lies_where_the_kernel_writes(order):
    # No meta tensor can be recorded, so that only the place of the trace is looked at: the kernel needs it on the CPU.
    groups = [{"params": [ones(3, device=device)], "diagnostics": True} for device in ("meta", "cpu")]
    for group in groups:
        group["params"][0].grad = torch.ones_like(group["params"][0])
    optimizer = KourkoutasBeta(groups[::order])
    optimizer.route()
    assert optimizer._recorder.ring.is_cpu
    assert optimizer._recorder.rows.is_cpu


# torch's hooks; test_optim_db.py has those of one optimizer around a step


def test_global_step_hooks_run_once():
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    p = ones(1)
    p.grad = torch.ones_like(p)
    optimizer = KourkoutasBeta([p])
    seen = []
    hooks = [
        register_optimizer_step_pre_hook(lambda o, args, kwargs: seen.append("before")),
        register_optimizer_step_post_hook(lambda o, args, kwargs: seen.append("after")),
    ]
    optimizer.step()
    for hook in hooks:
        hook.remove()
    optimizer.step()
    assert seen == ["before", "after"]


def test_hooks_of_load_state_dict_change_what_is_loaded_and_what_was():
    p = ones(3)
    optimizer = stepped([p])
    saved = copy.deepcopy(optimizer.state_dict())

    def before(_, loaded):
        loaded = copy.deepcopy(loaded)
        loaded["state"][0]["step"] = torch.tensor(100.0)
        return loaded

    handle = optimizer.register_load_state_dict_pre_hook(before)
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["step"].item() == 100
    handle.remove()

    def after(loaded):
        loaded.state[p]["step"] = torch.tensor(55.0)

    optimizer.register_load_state_dict_post_hook(after)
    optimizer.load_state_dict(saved)
    assert optimizer.state[p]["step"].item() == 55
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 0
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1


@pytest.mark.parametrize("closure", [None, lambda: 1.0])
def test_step_hooks_see_what_those_of_adam_see(closure):
    seen = []
    for make in (KourkoutasBeta, torch.optim.Adam):
        p = ones(3)
        p.grad = torch.ones(3)
        optimizer = make([p], lr=0.1)
        optimizer.register_step_pre_hook(lambda _, args, kwargs: seen.append((args[1:], kwargs)))
        optimizer.step() if closure is None else optimizer.step(closure)
    assert seen[0] == seen[1]


def test_the_error_of_a_gradient_that_is_not_finite_can_be_sent_to_another_process():
    error = NonFiniteGradient("w")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert again.bucket == "w"
