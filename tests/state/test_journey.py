"""A state that goes from framework to framework gives the curve of a run that stayed where it was."""

import numpy as np
import pytest

from kourkoutas import state
from kourkoutas.rule import BIAS_CORRECTIONS, HYPER_NAMES, Hyper
from tests.state.problem import FRAMEWORKS, entry, gradients, start

pytest.importorskip("torch")
pytest.importorskip("optax")
pytest.importorskip("mlx.core")
pytest.importorskip("safetensors")

HOP = 100
ROUTE = ("torch", "optax", "mlx", "torch")
BUCKETS = ("module", "shape", "global")


def by_kind(name, array):
    """Buckets by a function: biases together, the rest by its number of axes."""
    return "biases" if name.endswith("bias") else len(array.shape)


CASES = {
    "default": {},
    "amsgrad": {"decay": 1.0},
    "leaky": {"decay": 0.98},
    "max_ratio": {"max_ratio": 2.0},
    "clip only": {"decay": 0.0, "max_ratio": 0.5},
    "adaptive_tiny": {"adaptive_tiny": True, "tiny_denom": 1e-3},
    "exact": {"bias_correction": "exact"},
    "none": {"bias_correction": "none"},
    "warmup ends on the way": {"warmup_steps": 150},
    "weight decay": {"weight_decay": 0.1},
    "skip": {"nonfinite": "skip"},
    "everything": {
        "decay": 0.98,
        "max_ratio": 3.0,
        "adaptive_tiny": True,
        "tiny_denom": 1e-3,
        "bias_correction": "exact",
        "warmup_steps": 150,
        "weight_decay": 0.1,
        "nonfinite": "skip",
        "buckets": "module",
    },
    "module": {"buckets": "module"},
    "shape": {"buckets": "shape"},
    "global": {"buckets": "global"},
    "function": {"buckets": by_kind},
    "lr_warmup": {"bias_correction": "exact", "lr_warmup": True},
    # No axis is longer than the other, or it has no factor: other eigenvectors are not determined.
    "eigen": {"basis": "eigen", "basis_every": 7, "basis_memory": 0.9, "basis_limit": 3, "bias_correction": "exact"},
    "fixed beta2": {"beta2_min": 0.95, "beta2_max": 0.95},
    "betas": {"beta1": 0.8, "beta2_min": 0.7, "beta2_max": 0.99, "alpha": 0.8, "tiny_spike": 1e-4, "eps": 1e-6},
}
# Every option once, in few runs; the slow tests have each by itself.
TOGETHER = {
    "default": {},
    "everything": CASES["everything"],
    "amsgrad, none, shape": {"decay": 1.0, "bias_correction": "none", "buckets": "shape", "weight_decay": 0.1},
    "eigen": CASES["eigen"],
    "leaky, lr_warmup": {"decay": 0.98, "bias_correction": "none", "lr_warmup": True},
    "clip only, exact, global": {"decay": 0.0, "max_ratio": 0.5, "bias_correction": "exact", "buckets": "global"},
    "exact, lr_warmup, skip, module": {
        "bias_correction": "exact",
        "lr_warmup": True,
        "nonfinite": "skip",
        "buckets": "module",
    },
    "skip, function, max_ratio": {**CASES["betas"], "nonfinite": "skip", "buckets": by_kind, "max_ratio": 2.0},
}


@pytest.mark.parametrize("cases", [CASES, TOGETHER], ids=["one by one", "together"])
def test_every_option_and_every_named_choice_travels(cases):
    tried = {name: {options[name] for options in cases.values() if name in options} for name in HYPER_NAMES}
    assert {name for name, values in tried.items() if not values - {getattr(Hyper(), name)}} == set()
    assert tried["bias_correction"] | {Hyper().bias_correction} == set(BIAS_CORRECTIONS)
    assert {str(options["buckets"]) for options in cases.values() if "buckets" in options} >= {*BUCKETS, str(by_kind)}


@pytest.mark.parametrize(
    "options",
    [
        *(pytest.param(options, id=name) for name, options in TOGETHER.items()),
        *(pytest.param(CASES[n], id=n, marks=pytest.mark.slow) for n in CASES if n not in TOGETHER),
    ],
)
def test_torch_to_optax_to_mlx_to_torch_is_the_curve_of_one_long_run(options, tmp_path):
    nan_at = (30, 170, 171, 333) if options.get("nonfinite") == "skip" else ()
    stayed = FRAMEWORKS["torch"](start(), options)
    moved, file, largest = None, tmp_path / "state.safetensors", 0.0
    for hop, name in enumerate(ROUTE):
        if moved is not None:
            moved.save(file)
        moved = FRAMEWORKS[name](start() if moved is None else moved.params, options, file if hop else None)
        for t in range(hop * HOP, (hop + 1) * HOP):
            stayed.step(gradients(stayed.params, t, nan_at))
            moved.step(gradients(moved.params, t, nan_at))
        here, there = moved.params, stayed.params
        for n, want in there.items():
            np.testing.assert_allclose(here[n], want, rtol=0, atol=1e-6, err_msg=f"{n} after {(hop + 1) * HOP} steps")
            assert np.isfinite(want).all()
            largest = max(largest, float(np.abs(here[n] - want).max()))
    print(f"largest difference {largest:.1e}")


def test_bfloat16_moments_of_torch_arrive_to_the_bit(tmp_path):
    import torch

    options, file = {"state_dtype": torch.bfloat16}, tmp_path / "state.safetensors"
    first = FRAMEWORKS["torch"](start(), options)
    for t in range(HOP):
        first.step(gradients(first.params, t))
    first.save(file)
    second = FRAMEWORKS["torch"](first.params, options, file)
    third = FRAMEWORKS["optax"](first.params, {}, file)
    for name, p in first.tensors.items():
        old, new = first.optimizer.state[p], second.optimizer.state[second.tensors[name]]
        for slot in ("exp_avg", "exp_avg_sq", "norm_ema", "step"):
            assert old[slot].dtype == new[slot].dtype
            assert torch.equal(old[slot], new[slot])
        np.testing.assert_array_equal(old["exp_avg"].float().numpy(), third.state[0].mu[name])
    third.save(file)
    fourth = FRAMEWORKS["torch"](first.params, options, file)
    for name, p in first.tensors.items():
        for slot in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(first.optimizer.state[p][slot], fourth.optimizer.state[fourth.tensors[name]][slot])


@pytest.mark.parametrize("case", ["everything", "lr_warmup", "eigen"])
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_the_same_framework_goes_on_to_the_bit(name, case, tmp_path):
    options = {**CASES[case], "nonfinite": "skip"}
    first = FRAMEWORKS[name](start(), options)
    for t in range(12):
        first.step(gradients(first.params, t, nan_at=(5,)))
    first.save(tmp_path / "file")
    second = FRAMEWORKS[name](first.params, options, tmp_path / "file")
    for t in range(12, 20):
        first.step(gradients(first.params, t, nan_at=(15,)))
        second.step(gradients(second.params, t, nan_at=(15,)))
    for n, want in first.params.items():
        np.testing.assert_array_equal(second.params[n], want)
    second.save(tmp_path / "second")
    first.save(tmp_path / "first")
    assert (tmp_path / "second").read_bytes() == (tmp_path / "first").read_bytes()


@pytest.mark.parametrize("source", FRAMEWORKS)
def test_counts_of_calls_and_skipped_steps_travel(source, tmp_path):
    options = {"nonfinite": "skip"}
    first = FRAMEWORKS[source](start(), options)
    for t in range(9):
        first.step(gradients(first.params, t, nan_at=(2, 7)))
    first.save(tmp_path / "file")
    kept = state.read(tmp_path / "file")
    assert kept.count == 9
    assert dict(zip(kept.names, kept.scalars["step"].tolist(), strict=True)) == {
        "dec.bias": 9, "dec.weight": 9, "enc.bias": 7, "enc.weight": 9, "gain": 9,
    }  # fmt: skip
    assert entry(kept, "skipped", "enc.bias") == 2
    assert kept.scalars["skipped"].sum() == 2
    for target in FRAMEWORKS:
        again = FRAMEWORKS[target](first.params, options, tmp_path / "file")
        again.save(tmp_path / "again")
        other = state.read(tmp_path / "again")
        for name in kept.names:
            for vector in ("step", "ema", "skipped"):
                assert entry(other, vector, name) == entry(kept, vector, name)
            for kind, arrays in kept.moments.items():
                np.testing.assert_array_equal(other.moments[kind][name], arrays[name])
        assert other.count == 9


def test_a_schedule_of_optax_goes_on_where_torch_was_if_its_count_is_set(tmp_path):
    import jax
    import jax.numpy as jnp
    import optax

    from kourkoutas.optax import kourkoutas_beta
    from kourkoutas.state.optax import load

    first = FRAMEWORKS["torch"](start(), {})
    for t in range(4):
        first.step(gradients(first.params, t))
    first.save(tmp_path / "file")
    solver = kourkoutas_beta(lambda count: jnp.where(count < 4, jnp.nan, 0.0))  # a step at count < 4 would show
    params = {name: jnp.asarray(x) for name, x in first.params.items()}
    opt_state = load(tmp_path / "file", solver.init(params))
    opt_state = optax.tree_utils.tree_set(opt_state, count=opt_state[0].count)
    updates, _ = jax.jit(solver.update)(gradients(first.params, 4), opt_state, params)
    for name, x in optax.apply_updates(params, updates).items():
        np.testing.assert_array_equal(x, first.params[name])


def test_parameters_without_a_gradient_so_far_travel_with_none(tmp_path):
    params = start()
    first = FRAMEWORKS["torch"](params, {"bias_correction": "exact"})
    for t in range(3):
        for name, p in first.tensors.items():
            p.grad = None if name == "gain" else first.torch.from_numpy(gradients(first.params, t)[name])
        first.optimizer.step()
    first.save(tmp_path / "file")
    assert entry(state.read(tmp_path / "file"), "step", "gain") == 0
    ends = []
    for target in FRAMEWORKS:
        run = FRAMEWORKS[target](first.params, {"bias_correction": "exact"}, tmp_path / "file")
        for t in range(3, 6):
            run.step(gradients(run.params, t))
        ends.append(run.params)
    for other in ends[1:]:
        for name, want in ends[0].items():
            np.testing.assert_allclose(other[name], want, rtol=0, atol=1e-6)


def complex_run(name, params, steps, file=None, **options):
    """Parameters after `steps`, from and to the portable state `file`; the gradients are those of |z|²/2 and noise."""
    grads = [np.random.default_rng(t).normal(size=(3, 2)).view(np.complex128)[:, 0].astype(np.complex64) for t in steps]
    if name == "torch":
        import torch

        from kourkoutas.state.torch import load, save
        from kourkoutas.torch import KourkoutasBeta

        z = torch.nn.Parameter(torch.from_numpy(params.copy()))
        optimizer = KourkoutasBeta([("z", z)], lr=1e-2, **options)
        if file.exists():
            load(file, optimizer)
        for g in grads:
            z.grad = torch.from_numpy(g)
            optimizer.step()
        save(optimizer, file)
        return z.detach().numpy()
    import jax.numpy as jnp
    import optax

    from kourkoutas.optax import kourkoutas_beta
    from kourkoutas.state.optax import load, save

    solver = kourkoutas_beta(1e-2, **options)
    tree = {"z": jnp.asarray(params)}
    opt_state = load(file, solver.init(tree)) if file.exists() else solver.init(tree)
    for g in grads:
        updates, opt_state = solver.update({"z": jnp.asarray(g)}, opt_state, tree)
        tree = optax.apply_updates(tree, updates)
    save(opt_state, file)
    return np.asarray(tree["z"])


def test_complex_parameters_travel_between_torch_and_optax(tmp_path):
    options = {"decay": 0.98, "bias_correction": "exact"}
    z = np.array([1 + 2j, -1j, 0.5], np.complex64)
    stayed = complex_run("torch", z, range(20), tmp_path / "stayed", **options)
    moved = z
    for hop, name in enumerate(("torch", "optax", "torch", "optax")):
        moved = complex_run(name, moved, range(5 * hop, 5 * hop + 5), tmp_path / "moved", **options)
    np.testing.assert_allclose(moved, stayed, rtol=0, atol=1e-6)
    there, here = state.read(tmp_path / "stayed"), state.read(tmp_path / "moved")
    for kind in ("m", "v", "v_max"):
        assert here.moments[kind]["z"].dtype == np.complex64
        np.testing.assert_allclose(here.moments[kind]["z"], there.moments[kind]["z"], rtol=1e-5, atol=1e-7)
