"""Saving, loading, copying: state is complete, exact and keeps its dtypes."""

import copy
import io
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta, native

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
        ("float32", "parameter", {}),
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


def test_a_group_added_later_has_buckets_of_its_own_and_is_saved():
    model, optimizer = model_and_optimizer(buckets="global")
    steps(model, optimizer, 0, 2)
    extra = torch.nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [("extra", extra)], "alpha": 0.5, "lr": 0.1})
    assert optimizer.bucket_names == ["all@0", "all@1"]
    extra.grad = torch.ones(3)
    steps(model, optimizer, 2, 4)
    # r = ½·r + ½·√3, twice from 0
    assert optimizer.state[extra]["norm_ema"].item() == pytest.approx(0.75 * 3**0.5)
    assert len(optimizer.state_dict()["state"]) == 5


def test_no_v_max_is_allocated_for_clip_only():
    model, optimizer = model_and_optimizer(decay=0, max_ratio=3)
    steps(model, optimizer, 0, 1)
    assert all("max_exp_avg_sq" not in optimizer.state[p] for p in model.parameters())


@pytest.mark.parametrize("name", ["default", "full"])
def test_a_state_saved_by_version_0_1_loads_and_goes_on_with_the_same_bits(name):
    # Ten steps by version 0.1 from these parameters, its state, and the parameters after ten more.
    saved = torch.load(Path(__file__).parent / "saved_by_0_1.pt", weights_only=True)[name]
    params = [torch.nn.Parameter(p.clone()) for p in saved["half"]]
    optimizer = KourkoutasBeta(params)
    optimizer.load_state_dict(copy.deepcopy(saved["state"]))
    (group,) = saved["state"]["param_groups"]
    assert optimizer.param_groups[0]["betas"] == (group["beta1"], group["beta2_max"])
    for i, p in enumerate(params):
        for key, value in saved["state"]["state"][i].items():
            assert torch.equal(optimizer.state[p][key], value)
    for t in range(10, 20):
        generator = torch.Generator().manual_seed(t)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator) * (30.0 if t % 7 == 3 else 1.0)
        optimizer.step()
    for p, end in zip(params, saved["end"], strict=True):
        if native.kernel is None:
            torch.testing.assert_close(p.detach(), end, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(p, end)
