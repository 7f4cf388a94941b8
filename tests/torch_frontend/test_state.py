"""Saving, loading, copying: state is complete, exact and keeps its dtypes."""

import copy
import io
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from kourkoutas.trace import Trace

FULL = {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True, "bias_correction": "exact", "nonfinite": "skip"}


def model_and_optimizer(dtype=torch.float32, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 7)).to(dtype)
    return model, KourkoutasBeta(model.named_parameters(), lr=1e-2, **options)


def steps(model, optimizer, first, last):
    for t in range(first, last):
        generator = torch.Generator().manual_seed(t)
        for p in model.parameters():
            scale = 50.0 if t % 17 == 3 else 1.0
            p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)
        optimizer.step()


RESUME = textwrap.dedent(
    """
    import sys, torch
    from tests.torch_frontend.test_state import model_and_optimizer, steps
    saved = torch.load(sys.argv[1], weights_only=True)
    model, optimizer = model_and_optimizer(getattr(torch, sys.argv[3]), buckets=sys.argv[4])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    steps(model, optimizer, 50, 250)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[2])
    """
)


def assert_same_state(a, b):
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for i, state in a["state"].items():
        assert state.keys() == b["state"][i].keys()
        for name, value in state.items():
            assert value.dtype == b["state"][i][name].dtype, name
            assert torch.equal(value, b["state"][i][name]), name


@pytest.mark.parametrize(
    ("dtype", "buckets", "options"),
    [
        pytest.param("float32", "parameter", {}, marks=pytest.mark.slow),
        ("bfloat16", "shape", FULL),
        pytest.param("float32", "shape", FULL, marks=pytest.mark.slow),
        pytest.param("bfloat16", "parameter", {}, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumed_in_a_new_process_is_bitwise_the_run_that_never_stopped(tmp_path, dtype, buckets, options):
    model, optimizer = model_and_optimizer(getattr(torch, dtype), buckets=buckets, **options)
    steps(model, optimizer, 0, 50)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    steps(model, optimizer, 50, 250)
    args = [tmp_path / "half.pt", tmp_path / "resumed.pt", dtype, buckets]
    subprocess.run([sys.executable, "-c", RESUME, *map(str, args)], check=True)
    resumed = torch.load(tmp_path / "resumed.pt", weights_only=True)
    for name, p in model.state_dict().items():
        assert torch.equal(resumed["model"][name], p)
    assert_same_state(resumed["optimizer"], optimizer.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bucket_state_keeps_float32_for_low_precision_parameters(dtype):
    model, optimizer = model_and_optimizer(dtype, bias_correction="exact")
    steps(model, optimizer, 0, 3)
    other, loaded = model_and_optimizer(dtype, bias_correction="exact")
    loaded.load_state_dict(optimizer.state_dict())
    for p in other.parameters():
        assert loaded.state[p]["norm_ema"].dtype == torch.float32
        assert loaded.state[p]["log_beta2"].dtype == torch.float32
        assert loaded.state[p]["exp_avg"].dtype == dtype


def test_float64_parameters_have_float64_statistics():
    model, optimizer = model_and_optimizer(torch.float64)
    steps(model, optimizer, 0, 1)
    assert {optimizer.state[p]["norm_ema"].dtype for p in model.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    "options",
    [{"buckets": "global"}, {"bias_correction": "exact"}, {"buckets": "global", "foreach": True}, {"basis": "eigen"}],
    ids=lambda options: ", ".join(map(str, options.values())),
)
def test_a_group_of_float32_and_float64_parameters_goes_on_to_the_bit(options):
    def made():
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2).double())
        return model, KourkoutasBeta(model.named_parameters(), lr=1e-2, **options)

    model, optimizer = made()
    steps(model, optimizer, 0, 25)
    again, resumed = made()
    again.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same_state(optimizer.state_dict(), resumed.state_dict())
    steps(model, optimizer, 25, 50)
    steps(again, resumed, 25, 50)
    assert_same_state(optimizer.state_dict(), resumed.state_dict())
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


def clones():
    def by_pickle(model, optimizer):
        return pickle.loads(pickle.dumps((model, optimizer)))

    def by_torch_save(model, optimizer):
        buffer = io.BytesIO()
        torch.save((model, optimizer), buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)

    return [copy.deepcopy, by_pickle, by_torch_save]


@pytest.mark.parametrize("clone", clones(), ids=["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("buckets", ["parameter", "global"])
def test_a_copy_goes_on_by_itself_exactly(clone, buckets):
    model, optimizer = model_and_optimizer(buckets=buckets, **FULL)
    steps(model, optimizer, 0, 10)
    twin, twin_optimizer = clone((model, optimizer)) if clone is copy.deepcopy else clone(model, optimizer)
    steps(twin, twin_optimizer, 10, 20)
    before = [p.detach().clone() for p in model.parameters()]
    assert not torch.equal(before[0], next(twin.parameters()))
    steps(model, optimizer, 10, 20)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("clone", clones()[1:], ids=["pickle", "torch.save"])
def test_an_optimizer_whose_buckets_are_a_lambda_can_be_pickled_and_goes_on(clone):
    model, optimizer = model_and_optimizer(buckets=lambda name, p: p.ndim)
    steps(model, optimizer, 0, 3)
    twin, twin_optimizer = clone(model, optimizer)
    assert twin_optimizer.bucket_names == ["2", "1"]
    steps(model, optimizer, 3, 6)
    steps(twin, twin_optimizer, 3, 6)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    with pytest.raises(ValueError, match=r"`buckets` was a function .* give the new group its own `buckets`"):
        twin_optimizer.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(2)))]})
    twin_optimizer.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(2)))], "buckets": "global"})
    assert twin_optimizer.bucket_names == ["2", "1", "all"]


def _by_rank(name, p):
    return p.ndim


@pytest.mark.parametrize("clone", clones(), ids=["deepcopy", "pickle", "torch.save"])
def test_a_function_for_buckets_that_can_be_pickled_is_kept_for_groups_to_come(clone):
    model, optimizer = model_and_optimizer(buckets=_by_rank)
    _, twin = clone((model, optimizer)) if clone is copy.deepcopy else clone(model, optimizer)
    twin.add_param_group({"params": [("new", torch.nn.Parameter(torch.ones(1, 1, 1)))]})
    assert twin.bucket_names == ["2", "1", "3"]


def test_members_of_a_bucket_share_their_moving_average_also_after_loading():
    model, optimizer = model_and_optimizer(buckets="global")
    steps(model, optimizer, 0, 3)
    other, loaded = model_and_optimizer(buckets="global")
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    emas = [loaded.state[p]["norm_ema"] for p in other.parameters()]
    assert all(ema is emas[0] for ema in emas)


def test_a_callable_bucket_saves_and_loads_by_its_answers(tmp_path):
    def by_rank(name, p):
        return p.ndim

    model, optimizer = model_and_optimizer(buckets=by_rank)
    steps(model, optimizer, 0, 4)
    torch.save(optimizer.state_dict(), tmp_path / "o.pt")
    other, loaded = model_and_optimizer(buckets="parameter")
    loaded.load_state_dict(torch.load(tmp_path / "o.pt", weights_only=True))
    assert loaded.bucket_names == ["2", "1"]
    other.load_state_dict(model.state_dict())
    steps(model, optimizer, 4, 8)
    steps(other, loaded, 4, 8)
    assert torch.equal(next(model.parameters()), next(other.parameters()))


def test_an_adam_checkpoint_loads_and_keeps_moments_and_steps():
    model, _ = model_and_optimizer()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    steps(model, adam, 0, 5)
    optimizer = KourkoutasBeta(model.parameters(), lr=1e-2, beta2_min=0.999)
    optimizer.load_state_dict(copy.deepcopy(adam.state_dict()))
    twin = copy.deepcopy(model)
    twin_adam = torch.optim.Adam(twin.parameters(), lr=1e-2)
    twin_adam.load_state_dict(adam.state_dict())
    steps(model, optimizer, 5, 15)
    steps(twin, twin_adam, 5, 15)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def adam_state(make, **options):
    """A model, and the state that an Adam has left of it after five steps."""
    model, _ = model_and_optimizer()
    adam = make(model.parameters(), lr=1e-2, **options)
    steps(model, adam, 0, 5)
    return model, copy.deepcopy(adam.state_dict())


@pytest.mark.parametrize("told", [True, False], ids=["torch 2.7 and later", "before"])
def test_the_state_of_an_adam_with_l2_decay_is_refused_with_the_remedy_and_nothing_changes(told):
    model, saved = adam_state(torch.optim.Adam, weight_decay=0.1)
    if not told:
        del saved["param_groups"][0]["decoupled_weight_decay"]
    optimizer = KourkoutasBeta(model.parameters(), lr=1e-2)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"`weight_decay` of 0.1 .*\['decoupled_weight_decay'\] = True.*nothing was"):
        optimizer.load_state_dict(saved)
    assert_same_state(optimizer.state_dict(), before)
    saved["param_groups"][0]["decoupled_weight_decay"] = True
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_the_decoupled_decay_of_an_adamw_is_taken_over():
    model, saved = adam_state(torch.optim.AdamW, weight_decay=0.1)
    optimizer = KourkoutasBeta(model.parameters(), lr=1e-2, beta2_min=0.999)
    optimizer.load_state_dict(copy.deepcopy(saved))
    twin = copy.deepcopy(model)
    adam = torch.optim.AdamW(twin.parameters())
    adam.load_state_dict(saved)
    steps(model, optimizer, 5, 15)
    steps(twin, adam, 5, 15)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_the_state_of_an_amsgrad_is_taken_over_and_stays_an_amsgrad():
    model, saved = adam_state(torch.optim.Adam, amsgrad=True)
    optimizer = KourkoutasBeta(model.parameters(), lr=1e-2, beta2_min=0.999)
    optimizer.load_state_dict(copy.deepcopy(saved))
    assert optimizer.param_groups[0]["amsgrad"] is True
    assert optimizer.param_groups[0]["decay"] == 1
    twin = copy.deepcopy(model)
    adam = torch.optim.Adam(twin.parameters())
    adam.load_state_dict(saved)
    steps(model, optimizer, 5, 15)
    steps(twin, adam, 5, 15)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-6)
        ours, theirs = (x["max_exp_avg_sq"] for x in (optimizer.state[p], adam.state[q]))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-9)


def test_the_state_of_an_amsgrad_leaves_a_leak_of_ours_as_it_is():
    model, saved = adam_state(torch.optim.Adam, amsgrad=True)
    optimizer = KourkoutasBeta(model.parameters(), lr=1e-2, decay=0.98)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["decay"] == 0.98


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW])
def test_an_adam_that_loads_this_state_decays_weights_as_this_did(make):
    model, optimizer = model_and_optimizer(weight_decay=0.1)
    steps(model, optimizer, 0, 5)
    adam = make(model.parameters())
    adam.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert adam.param_groups[0]["decoupled_weight_decay"] is True
    assert adam.param_groups[0]["weight_decay"] == 0.1


def test_a_group_added_later_has_buckets_of_its_own_and_is_saved():
    model, optimizer = model_and_optimizer(buckets="global")
    steps(model, optimizer, 0, 2)
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [("extra", extra)], "alpha": 0.5, "lr": 0.1})
    assert optimizer.bucket_names == ["group0.all", "group1.all"]
    extra.grad = torch.ones(3)
    steps(model, optimizer, 2, 4)
    # r = ½·r + ½·√3, twice from 0
    assert optimizer.state[extra]["norm_ema"].item() == pytest.approx(0.75 * 3**0.5)
    assert len(optimizer.state_dict()["state"]) == 5


def test_no_v_max_is_allocated_for_clip_only():
    model, optimizer = model_and_optimizer(decay=0, max_ratio=3)
    steps(model, optimizer, 0, 1)
    assert all("max_exp_avg_sq" not in optimizer.state[p] for p in model.parameters())


def others():
    yield "L-BFGS", lambda params: torch.optim.LBFGS(params)
    yield "SGD", lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)
    yield "plain SGD", lambda params: torch.optim.SGD(params, lr=0.1)
    yield "RMSprop", lambda params: torch.optim.RMSprop(params, lr=0.1)
    yield "Adamax", lambda params: torch.optim.Adamax(params, lr=0.1)


@pytest.mark.parametrize(("name", "make"), list(others()), ids=[name for name, _ in others()])
def test_a_state_that_is_neither_ours_nor_adams_is_refused_and_nothing_changes(name, make):
    model, optimizer = model_and_optimizer()
    steps(model, optimizer, 0, 2)
    other = make(list(model.parameters()))
    other.step(lambda: sum(p.square().sum() for p in model.parameters()))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"`state_dict` is neither Kourkoutas-β's nor Adam's: .*nothing was loaded"):
        optimizer.load_state_dict(other.state_dict())
    assert_same_state(optimizer.state_dict(), before)


def test_numbers_are_views_of_one_vector_and_a_file_holds_it_once(tmp_path):
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(1000)]
    optimizer = KourkoutasBeta(params)
    for p in params:
        p.grad = torch.ones(1)
    optimizer.step()
    steps = [optimizer.state[p]["step"] for p in params]
    assert all(x.ndim == 0 for x in steps)
    assert len({x.untyped_storage().data_ptr() for x in steps}) == 1
    adam = torch.optim.Adam(params)
    adam.step()
    torch.save(optimizer.state_dict(), tmp_path / "ours.pt")
    torch.save(adam.state_dict(), tmp_path / "adams.pt")
    assert (tmp_path / "ours.pt").stat().st_size < (tmp_path / "adams.pt").stat().st_size


def test_safetensors_takes_the_numbers_of_a_state(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    model, optimizer = model_and_optimizer()
    steps(model, optimizer, 0, 2)
    flat = {f"{i}.{k}": v for i, entries in optimizer.state_dict()["state"].items() for k, v in entries.items()}
    safetensors.save_file(flat, tmp_path / "state.safetensors")
    loaded = safetensors.load_file(tmp_path / "state.safetensors")
    assert all(torch.equal(loaded[k], v) for k, v in flat.items())


def test_the_names_of_many_buckets_take_no_quadratic_time():
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(20_000)]
    optimizer = KourkoutasBeta([{"params": params[:10_000]}, {"params": params[10_000:], "buckets": "global"}])

    class Counted(str):
        compared = 0

        def __eq__(self, other):
            Counted.compared += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    for group in optimizer.param_groups:
        group["bucket_names"] = [Counted(name) for name in group["bucket_names"]]
    assert len(optimizer.bucket_names) == 10_001
    assert Counted.compared < 100_000


def test_the_trace_of_a_resumed_optimizer_goes_on_counting():
    model, optimizer = model_and_optimizer(diagnostics=True)
    whole = Trace(optimizer.bucket_names)
    steps(model, optimizer, 0, 30)
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    steps(model, optimizer, 30, 35)
    optimizer.pull(whole)

    model, optimizer = model_and_optimizer(diagnostics=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    trace = Trace(optimizer.bucket_names)
    for first, last in ((30, 33), (33, 35)):
        steps(model, optimizer, first, last)
        optimizer.pull(trace)
    assert trace.steps.tolist() == [31, 32, 33, 34, 35]
    assert trace.lost == 0
    assert np.array_equal(trace.beta2, whole.beta2[30:])


def test_the_trace_of_a_pickled_optimizer_goes_on_counting():
    model, optimizer = model_and_optimizer(diagnostics=True)
    steps(model, optimizer, 0, 4)
    resumed = pickle.loads(pickle.dumps(optimizer))
    for p in resumed.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    resumed.step()
    trace = Trace(resumed.bucket_names)
    resumed.pull(trace)
    assert trace.steps.tolist() == [5]


def test_buckets_of_the_same_name_are_called_after_their_group():
    encoder, head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
    groups = [{"params": encoder.named_parameters(), "name": "encoder"}, {"params": head.named_parameters()}]
    optimizer = KourkoutasBeta(groups)
    assert optimizer.bucket_names == ["encoder.weight", "encoder.bias", "group1.weight", "group1.bias"]


def test_a_name_made_from_a_group_does_not_take_that_of_another_bucket():
    a, b, c = (torch.nn.Parameter(torch.ones(1)) for _ in range(3))
    groups = [{"params": [("w", a), ("head.w", b)]}, {"params": [("w", c)], "name": "head"}]
    assert KourkoutasBeta(groups).bucket_names == ["group0.w", "head.w", "head.w#2"]
