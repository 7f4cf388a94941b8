"""`basis="eigen"` in MLX, beyond the numbers of the conformance table."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from kourkoutas.mlx import KourkoutasBeta
from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper
from tests.mlx_frontend.test_behaviour import FULL, loss, problem, train

EIGEN = {"basis": "eigen", "basis_every": 3}
SHAPES = {"a": (4, 4), "b": (4, 4), "c": (3, 2, 3), "d": (5,), "e": ()}


def start(dtype=np.float32, shapes=SHAPES):
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def gradients(t, shapes=SHAPES):
    rng = np.random.default_rng([1, t])
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def arrays(tree, dtype=mx.float32):
    return {name: mx.array(x).astype(dtype) for name, x in tree.items()}


def run(optimizer, params, steps, grads=gradients):
    for t in steps:
        params = {**params, **optimizer.apply_gradients(arrays(grads(t)), params)}
        mx.eval(params, optimizer.state)
    return params


def assert_same(a, b):
    want, got = dict(tree_flatten(a)), dict(tree_flatten(b))
    assert want.keys() == got.keys()
    for name in want:
        assert want[name].dtype == got[name].dtype, name
        assert mx.array_equal(want[name], got[name], equal_nan=True), name


def bases(optimizer):
    return {name: x for name, x in tree_flatten(optimizer.state) if name.startswith("basis_") and "age" not in name}


def assert_orthonormal(optimizer, tolerance=2e-6):
    for name, q in bases(optimizer).items():
        unit = mx.eye(q.shape[-1], dtype=q.dtype)
        assert mx.abs(q.swapaxes(1, 2) @ q - unit).max().item() < tolerance, name


def assert_follows_the_oracle(options, grads, lr=1e-2, steps=12, tolerance=2e-6, buckets="parameter", shapes=SHAPES):
    optimizer = KourkoutasBeta(lr, buckets=buckets, **EIGEN, **options)
    oracle = Oracle(start(shapes=shapes), Hyper(**EIGEN, **options), buckets=buckets, lr=lr)
    params = run(optimizer, arrays(start(shapes=shapes)), range(steps), grads)
    with np.errstate(all="ignore"):
        for t in range(steps):
            oracle.step(grads(t))
    for name, x in params.items():
        np.testing.assert_allclose(np.array(x), oracle.params[name], rtol=0, atol=tolerance, err_msg=name)
    return optimizer, oracle


# What is kept


def test_without_a_basis_the_state_is_what_it_was():
    optimizer = KourkoutasBeta(1e-2)
    optimizer.init(arrays(start()))
    assert set(optimizer.state) == {"step", "learning_rate", "alpha", "m", "v", "t", "ema", "skipped"}


def test_parameters_of_one_shape_share_a_stack_and_vectors_have_none():
    optimizer = KourkoutasBeta(1e-2, **EIGEN, basis_limit=3)
    optimizer.init(arrays(start(shapes={**SHAPES, "f": (9, 3), "g": (1, 3)})))
    found = {name: x.shape for name, x in tree_flatten(optimizer.state) if name.startswith(("factor", "basis_0"))}
    assert found == {
        "factor_scale.3x2x3": (1,),
        "factor_scale.9x3": (1,),
        "factor_scale.1x3": (1,),
        "factor_0.3x2x3": (1, 3, 3),
        "basis_0.3x2x3": (1, 3, 3),
        "factor_1.3x2x3": (1, 2, 2),
        "factor_1.9x3": (1, 3, 3),
        "factor_1.1x3": (1, 3, 3),
        "factor_2.3x2x3": (1, 3, 3),
    }
    every = KourkoutasBeta(1e-2, **EIGEN)
    every.init(arrays(start()))
    assert every.state["factor_0"]["4x4"].shape == (2, 4, 4)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_precision_parameters_have_moments_factors_and_bases_in_float32(dtype):
    optimizer = KourkoutasBeta(1e-2, **EIGEN)
    first = arrays(start(), dtype)
    params = run(optimizer, first, range(8))
    wide = run(KourkoutasBeta(1e-2, **EIGEN), {name: x.astype(mx.float32) for name, x in first.items()}, range(8))
    # Each of the seven steps that move rounds numbers below 4 by at most half of their last place.
    rounding = 7 * 2.0 ** (-10 if dtype == mx.float16 else -7)
    for name, x in params.items():
        assert x.dtype == dtype
        np.testing.assert_allclose(np.array(x.astype(mx.float32)), np.array(wide[name]), rtol=0, atol=rounding)
    for name, x in tree_flatten(optimizer.state):
        if name.split(".")[0] not in ("step", "t", "seen", "skipped", "basis_age"):
            assert x.dtype == mx.float32, name
    assert_orthonormal(optimizer)


def test_a_state_from_init_has_the_names_and_dtypes_of_one_after_steps():
    optimizer = KourkoutasBeta(1e-2, **EIGEN, **FULL, diagnostics=True)
    optimizer.init(arrays(start()))
    before = [(name, x.dtype) for name, x in tree_flatten(optimizer.state)]
    run(optimizer, arrays(start()), range(5))
    assert before == [(name, x.dtype) for name, x in tree_flatten(optimizer.state)]
    assert all(isinstance(x, mx.array) for _, x in tree_flatten(optimizer.state))


def test_a_loop_that_evaluates_the_parameters_only_piles_nothing_up():
    optimizer = KourkoutasBeta(1e-2, basis="eigen", basis_every=1000)
    shapes = {"w": (32, 32)}
    params = arrays(start(shapes=shapes))
    memory = []
    for t in range(40):
        params = optimizer.apply_gradients(arrays(gradients(t, shapes)), params)
        mx.eval(params)
        memory.append(mx.get_active_memory())
    # What is kept goes up and down with what other work has left; thirty gradients would be 120,000 bytes.
    assert max(memory[25:]) - min(memory[10:25]) < 5 * 4 * 32 * 32


# What it computes


@pytest.mark.parametrize("buckets", ["parameter", "module", "shape", "global"])
def test_a_fixed_beta2_is_soap_whatever_the_buckets(buckets):
    soap = {"beta1": 0.95, "beta2_min": 0.95, "beta2_max": 0.95, "bias_correction": "exact"}
    _, oracle = assert_follows_the_oracle(soap, gradients, buckets=buckets)
    assert set(oracle.beta2.values()) == {0.95}


def test_the_first_gradient_makes_the_basis_and_moves_nothing():
    optimizer = KourkoutasBeta(1e-2, **EIGEN, bias_correction="exact")
    params = run(optimizer, arrays(start()), range(1))
    assert_same(arrays(start()), params)
    assert optimizer.state["t"].tolist() == 0
    assert optimizer.state["seen"].tolist() == [1] * len(SHAPES)
    assert optimizer.state["log_beta2"].tolist() == [0.0] * len(SHAPES)
    assert min(optimizer.state["ema"].tolist()) > 0
    g = gradients(0)["a"].astype(np.float64)
    q = np.array(optimizer.state["basis_0"]["4x4"][0]).astype(np.float64)
    p = np.array(optimizer.state["basis_1"]["4x4"][0]).astype(np.float64)
    values = np.abs(np.diag(q.T @ g @ p))
    np.testing.assert_allclose(values, np.linalg.svd(g).S, rtol=1e-5)


def test_the_basis_turns_after_as_many_gradients_as_basis_every_says():
    optimizer = KourkoutasBeta(1e-2, **EIGEN)
    params, turned = arrays(start()), []
    for t in range(10):
        before = bases(optimizer)
        params = run(optimizer, params, [t])
        changed = [not mx.array_equal(x, before[name]).item() for name, x in bases(optimizer).items() if before]
        assert len(set(changed)) <= 1
        if changed and changed[0]:
            turned.append(t)
    assert turned == [3, 6, 9]


def test_a_parameter_whose_gradients_come_and_go_turns_by_its_own_count():
    def some(t):
        every = gradients(t)
        if t in (0, 4, 5):
            del every["b"]
        if t == 7:
            del every["a"], every["d"]
        return every

    optimizer, oracle = assert_follows_the_oracle({"bias_correction": "exact"}, some, steps=14, buckets="shape")
    assert dict(zip(SHAPES, optimizer.state["seen"].tolist(), strict=True)) == oracle.seen


def test_a_parameter_that_joins_later_begins_with_a_basis_of_its_own():
    shapes = {**SHAPES, "aa": (4, 4)}
    late, both = KourkoutasBeta(1e-2, **EIGEN), KourkoutasBeta(1e-2, **EIGEN)
    first = {name: x for name, x in start(shapes=shapes).items() if name != "aa"}

    def grads(t):
        return {name: x for name, x in gradients(t, shapes).items() if t >= 4 or name != "aa"}

    params = run(late, arrays(first), range(4), grads)
    params = run(late, {**params, "aa": mx.array(start(shapes=shapes)["aa"])}, range(4, 12), grads)
    want = run(both, arrays(start(shapes=shapes)), range(12), grads)
    assert_same(want, params)
    assert_same(both.state["basis_0"], late.state["basis_0"])
    assert late.state["basis_0"]["4x4"].shape == (3, 4, 4)


# Resuming


EVERYTHING = {**FULL, "nonfinite": "skip", "buckets": "shape"}


@pytest.mark.parametrize("stop", [0, 1, 5, 7])  # before the first gradient, with a basis, after a turn, between two
def test_a_run_saved_between_two_turns_goes_on_bit_for_bit(tmp_path, stop):
    options = {} if stop == 7 else {**EVERYTHING, "diagnostics": True}
    one = KourkoutasBeta(1e-2, **EIGEN, **options)
    one.init(arrays(start()))
    params = run(one, arrays(start()), range(stop))
    file = str(tmp_path / "state.safetensors")
    mx.save_safetensors(file, dict(tree_flatten({"params": params, "state": one.state})))
    loaded = tree_unflatten(list(mx.load(file).items()))
    two = KourkoutasBeta(1e-2, **EIGEN, **options)
    two.state = loaded["state"]
    want = run(one, params, range(stop, 13))
    got = run(two, loaded["params"], range(stop, 13))
    assert_same(want, got)
    assert_same(one.state, two.state)


def test_another_basis_every_from_here_on_still_turns_the_basis():
    optimizer = KourkoutasBeta(1e-2, basis="eigen", basis_every=20)
    params = run(optimizer, arrays(start()), range(8))
    other = KourkoutasBeta(1e-2, basis="eigen", basis_every=3)
    other.state = optimizer.state
    before = bases(other)
    run(other, params, range(8, 11))
    assert not mx.array_equal(before["basis_0.4x4"], bases(other)["basis_0.4x4"])


@pytest.mark.parametrize(("stop", "options"), [(1, {}), (5, EVERYTHING), (7, EVERYTHING)])
def test_a_run_that_goes_on_from_the_portable_file_does_so_to_the_bit(tmp_path, stop, options):
    portable = pytest.importorskip("kourkoutas.state.mlx")
    one, two = KourkoutasBeta(1e-2, **EIGEN, **options), KourkoutasBeta(1e-2, **EIGEN, **options)
    params = run(one, arrays(start()), range(stop))
    portable.save(one, tmp_path / "file")
    portable.load(tmp_path / "file", two, params)
    want, got = run(one, params, range(stop, 13)), run(two, params, range(stop, 13))
    assert_same(want, got)
    assert_same(one.state, two.state)


def test_the_portable_file_has_each_parameters_own_factors_and_bases(tmp_path):
    portable = pytest.importorskip("kourkoutas.state.mlx")
    optimizer = KourkoutasBeta(1e-2, **EIGEN, basis_limit=3)
    run(optimizer, arrays(start()), range(5))
    portable.save(optimizer, tmp_path / "file")
    found = portable.read(tmp_path / "file")
    shapes = {}
    for kind, matrices in found.bases.items():
        shapes[kind] = {name: x.shape for name, x in matrices.items()}
    lengths = {0: (3, 3), 1: (2, 2), 2: (3, 3)}
    want = {f"factor_{axis}": {"c": shape} for axis, shape in lengths.items()}
    want.update({f"basis_{axis}": {"c": shape} for axis, shape in lengths.items()})
    assert shapes == want
    assert found.scalars["seen"].tolist() == [5] * len(SHAPES)
    assert [x > 0 for x in found.scalars["factor_scale"].tolist()] == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "the file was written with, the optimizer without `basis='eigen'`"),
        ({**EIGEN, "basis_limit": 3}, "'a' has 'basis_0', .* in the file and none here: use the same `basis_limit`"),
    ],
)
def test_a_portable_file_with_other_bases_is_refused_and_nothing_changes(tmp_path, options, message):
    portable = pytest.importorskip("kourkoutas.state.mlx")
    saved, optimizer = KourkoutasBeta(1e-2, **EIGEN), KourkoutasBeta(1e-2, **options)
    params = run(saved, arrays(start()), range(5))
    portable.save(saved, tmp_path / "file")
    with pytest.raises(ValueError, match=message):
        portable.load(tmp_path / "file", optimizer, params)
    assert "m" not in optimizer.state


# Inside mx.compile


@pytest.mark.parametrize("init", [True, False])
@pytest.mark.parametrize("options", [{}, {**FULL, "nonfinite": "skip", "diagnostics": True, "weight_decay": 0.1}])
def test_a_compiled_step_turns_the_basis_as_the_eager_one_does(options, init):
    eager, compiled = KourkoutasBeta(1e-2, **EIGEN, **options), KourkoutasBeta(1e-2, **EIGEN, **options)
    want = train(eager, 14)
    got = train(compiled, 14, compiled=True, init=init)
    for name in want:
        np.testing.assert_allclose(want[name], got[name], rtol=0, atol=2e-6, err_msg=name)
    assert compiled.state["seen"].tolist() == [14] * 6
    for name, q in bases(eager).items():
        np.testing.assert_allclose(np.array(bases(compiled)[name]), np.array(q), rtol=0, atol=1e-4, err_msg=name)


def test_a_compiled_step_is_traced_once_for_each_age_of_the_basis():
    model, x, y = problem()
    optimizer = KourkoutasBeta(1e-2, **EIGEN)
    optimizer.init(model.trainable_parameters())
    traced = []

    def step():
        traced.append(optimizer.state["basis_age"]["layers.0.weight"].size)
        _, grads = nn.value_and_grad(model, loss)(model, x, y)
        optimizer.update(model, grads)

    state = [model.state, optimizer.state]
    compiled = mx.compile(step, inputs=state, outputs=state)
    for _ in range(20):
        compiled()
        mx.eval(state)
    assert traced == [0, 1, 2, 3]


def test_a_compiled_step_whose_state_is_replaced_turns_by_the_new_count():
    """Compiled steps know the basis's age from the state, so a loaded state needs no other word to them."""
    eager = KourkoutasBeta(1e-2, **EIGEN)
    params = run(eager, arrays(start()), range(5))
    saved = tree_unflatten(tree_flatten(eager.state))
    compiled = KourkoutasBeta(1e-2, **EIGEN)
    compiled.init(params)
    compiled.state.update(saved)
    here = dict(params)
    held = [here, compiled.state]

    def step(grads):
        here.update(compiled.apply_gradients(grads, here))

    run_compiled = mx.compile(step, inputs=held, outputs=held)
    for t in range(5, 11):
        run_compiled(arrays(gradients(t)))
        mx.eval(held)
    want = run(eager, params, range(5, 11))
    for name in want:
        np.testing.assert_allclose(np.array(here[name]), np.array(want[name]), rtol=0, atol=2e-6, err_msg=name)


def test_a_step_compiled_without_shapes_is_refused_since_it_could_not_turn_the_basis():
    optimizer = KourkoutasBeta(1e-2, **EIGEN)
    params = arrays(start())
    run(optimizer, params, range(2))
    held = [optimizer.state]
    step = mx.compile(optimizer.apply_gradients, inputs=held, outputs=held, shapeless=True)
    with pytest.raises(ValueError, match="cannot infer output shapes"):
        step(arrays(gradients(2)), params)


# Numerics


@pytest.mark.parametrize("scale", [1e-20, 1e-12, 1e12])
def test_the_basis_does_not_depend_on_the_size_of_the_gradients(scale):
    shapes = {"a": (4, 4), "c": (3, 2, 3)}

    def scaled(t):
        return {name: x * np.float32(scale) for name, x in gradients(t, shapes).items()}

    found = []
    for grads in (lambda t: gradients(t, shapes), scaled):
        optimizer = KourkoutasBeta(1e-2, **EIGEN)
        params = run(optimizer, arrays(start(shapes=shapes)), range(10), grads)
        assert all(mx.isfinite(x).all() for x in params.values())
        assert_orthonormal(optimizer)
        found.append(bases(optimizer))
    for name, want in found[0].items():
        np.testing.assert_allclose(np.array(found[1][name]), np.array(want), rtol=0, atol=2e-4, err_msg=name)


def test_gradients_whose_squares_overflow_leave_basis_and_parameters_finite():
    optimizer = KourkoutasBeta(1e-2, **EIGEN)
    params = run(optimizer, arrays(start()), range(8), lambda t: {n: 1e20 * g for n, g in gradients(t).items()})
    assert all(mx.isfinite(x).all() for x in params.values())
    assert_orthonormal(optimizer)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_factors_of_any_rank_have_an_orthonormal_basis(rank):
    shapes = {"a": (6, 5), "b": (2, 7)}
    rng = np.random.default_rng(2)
    left = {name: rng.normal(size=(shape[0], rank)) for name, shape in shapes.items()}
    right = {name: rng.normal(size=(rank, shape[1])) for name, shape in shapes.items()}

    def grads(t):
        return {name: ((t % 3 - 1) * left[name] @ right[name]).astype(np.float32) for name in shapes}

    optimizer = KourkoutasBeta(1e-2, **EIGEN)
    params = run(optimizer, arrays(start(shapes=shapes)), range(12), grads)
    assert all(mx.isfinite(x).all() for x in params.values())
    assert_orthonormal(optimizer)


def test_one_row_one_column_and_no_entries_at_all_are_fine():
    shapes = {"row": (1, 5), "column": (4, 1), "one": (1, 1), "none": (0, 3), "gain": ()}
    options = {"basis_limit": 2}
    optimizer = KourkoutasBeta(1e-2, **EIGEN)
    params = run(optimizer, arrays(start(shapes=shapes)), range(8), lambda t: gradients(t, shapes))
    assert params["none"].shape == (0, 3)
    assert all(mx.isfinite(x).all() for x in params.values())
    assert_orthonormal(optimizer)
    del shapes["none"]
    assert_follows_the_oracle(options, lambda t: gradients(t, shapes), shapes=shapes)


@pytest.mark.parametrize("bad", [0, 3, 5])
def test_a_skipped_gradient_counts_but_changes_neither_factors_nor_basis(bad):
    """At 0 the basis should have been made, at 3 it should have turned."""

    def grads(t):
        every = gradients(t)
        if t == bad:
            every["a"][1, 2] = np.nan
            every["d"][0] = np.inf
        return every

    options = {"nonfinite": "skip", "bias_correction": "exact", "decay": 0.98}
    optimizer, oracle = assert_follows_the_oracle(options, grads)
    assert dict(zip(SHAPES, optimizer.state["seen"].tolist(), strict=True)) == oracle.seen
    assert optimizer.state["skipped"].tolist() == list(oracle.skipped.values())


@pytest.mark.parametrize("bad", [0, 2])
def test_a_gradient_that_is_not_finite_propagates_without_an_error_of_lapack(bad):
    def grads(t):
        return {**gradients(t), "a": np.full((4, 4), np.nan, np.float32)} if t >= bad else gradients(t)

    params = run(KourkoutasBeta(1e-2, **EIGEN), arrays(start()), range(6), grads)
    assert mx.isnan(params["a"]).all()
    assert mx.isfinite(params["b"]).all()


def test_a_thousand_turns_keep_the_bases_orthonormal():
    optimizer = KourkoutasBeta(1e-3, basis="eigen", basis_every=1)
    shapes = {"a": (6, 6), "b": (4, 3, 2)}
    params = arrays(start(shapes=shapes))
    for t in range(1000):
        grads = {name: x * 10.0 ** (t % 7 - 3) for name, x in gradients(t, shapes).items()}
        params = optimizer.apply_gradients(arrays(grads), params)
        mx.eval(params, optimizer.state)
    assert_orthonormal(optimizer)


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"basis": "fourier"}, "`basis` must be None or \"eigen\"; got 'fourier'"),
        ({"basis": "eigen", "basis_every": 0}, "`basis_every` must be a whole number >= 1"),
        ({"basis": "eigen", "basis_memory": 1.0}, r"`basis_memory` must be in \[0, 1\)"),
        ({"basis": "eigen", "basis_limit": 2.5}, r"`basis_limit` .*got 2\.5"),
    ],
)
def test_bad_settings_are_named_with_their_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        KourkoutasBeta(1e-3, **arguments)


def test_a_state_in_a_basis_and_one_without_do_not_go_into_each_other():
    plain, eigen = KourkoutasBeta(1e-2), KourkoutasBeta(1e-2, **EIGEN)
    for optimizer in (plain, eigen):
        optimizer.init(arrays(start()))
    states = plain.state, eigen.state
    eigen.state, plain.state = states
    with pytest.raises(ValueError, match=r"made with basis='eigen' .*`basis` is None: construct with basis='eigen'"):
        plain.init(arrays(start()))
    with pytest.raises(ValueError, match="the state has no 'basis_age' of 'a'"):
        eigen.init(arrays(start()))


@pytest.mark.parametrize(("saved", "here"), [(1024, 3), (3, 1024)])
def test_a_state_saved_with_another_limit_is_refused(saved, here):
    old, new = KourkoutasBeta(1e-2, **EIGEN, basis_limit=saved), KourkoutasBeta(1e-2, **EIGEN, basis_limit=here)
    old.init(arrays(start()))
    new.state = old.state
    with pytest.raises(ValueError, match=f"of '4x4' .*`basis_limit` {here} give .*with the same parameters and"):
        new.init(arrays(start()))


def test_complex_parameters_are_refused_as_without_a_basis():
    with pytest.raises(TypeError, match=r"parameter 'n' .*complex64"):
        KourkoutasBeta(1e-3, **EIGEN).init({"n": mx.zeros((2, 2), mx.complex64)})


def test_raise_changes_nothing():
    optimizer = KourkoutasBeta(1e-2, **EIGEN, nonfinite="raise")
    params = run(optimizer, arrays(start()), range(3))
    before = {name: np.array(x) for name, x in tree_flatten(optimizer.state)}
    bad = arrays(gradients(3))
    bad["b"] = mx.full((4, 4), mx.nan)
    with pytest.raises(ArithmeticError, match="bucket 'b'"):
        optimizer.apply_gradients(bad, params)
    for name, x in tree_flatten(optimizer.state):
        np.testing.assert_array_equal(before[name], np.array(x), err_msg=name)
