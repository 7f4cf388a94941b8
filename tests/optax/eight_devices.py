"""Sharded training on eight devices against one; run by `test_sharded.py` in a process of its own, which has them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding, PartitionSpec

from kourkoutas.optax import kourkoutas_beta

P = PartitionSpec
AUTO = jax.sharding.AxisType.Auto

SHAPES = {"enc.w": (8, 4), "enc.b": (4,), "dec.w": (4, 16), "dec.b": (16,), "gain": ()}
# Sharded along rows, along both axes, along columns by both axes at once, and replicated.
SPECS = {"enc.w": P("x"), "enc.b": P(), "dec.w": P("y", "x"), "dec.b": P(("x", "y")), "gain": P()}
FULL = {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True, "bias_correction": "exact", "warmup_steps": 3}
CASES = {
    "parameter": {},
    "module": {"buckets": "module"},
    "shape": {"buckets": "shape"},
    "global": {"buckets": "global", "nonfinite": "skip"},
    "callable": {"buckets": lambda name, array: array.shape[:1]},
    "full": {**FULL, "buckets": "module", "nonfinite": "skip", "diagnostics": True, "weight_decay": 0.1},
}
STEPS = 20
TOLERANCE = {"float32": 2e-6, "float64": 1e-12}


def mesh():
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(AUTO, AUTO))


def numbers(dtype, bad=False):
    rng = np.random.default_rng(3)
    params = {name: jnp.asarray(3 * rng.normal(size=shape), dtype) for name, shape in SHAPES.items()}
    grads = []
    for t in range(STEPS):
        scale = {5: 100.0, 12: 300.0}.get(t, 1.0)
        grads.append({name: np.array(scale * rng.normal(size=shape), dtype) for name, shape in SHAPES.items()})
    if bad:
        grads[7]["dec.w"][3, 15] = np.inf  # in the last device's shard only
    return params, [{name: jnp.asarray(g) for name, g in step.items()} for step in grads]


def specs_of(solver, params, specs):
    """The PartitionSpecs of a state: moments like their parameters, everything else on every device."""
    state = jax.eval_shape(solver.init, params)
    return optax.tree.map_params(solver, lambda _, spec: spec, state, specs, transform_non_params=lambda _: P())


def train(update, solver, params, grads):
    @jax.jit
    def step(params, state, g):
        updates, state = update(g, state, params)
        return optax.apply_updates(params, updates), state

    run = params, jax.jit(solver.init)(params)
    for g in grads:
        # Steps that queue up on devices made of one CPU can block each other for ever.
        run = jax.block_until_ready(step(*run, g))
    return run


@functools.cache
def by_one_device(case, dtype="float32", bad=False):
    """What one device makes of `numbers` with the options of a case: (parameters, state)."""
    params, grads = numbers(dtype, bad)
    solver = kourkoutas_beta(1e-2, **CASES[case])
    return train(solver.update, solver, params, grads)


def mapped(solver, params, specs=SPECS, **options):
    state = specs_of(solver, params, specs)
    return jax.jit(
        jax.shard_map(solver.update, mesh=mesh(), in_specs=(specs, state, specs), out_specs=(specs, state), **options)
    )


def assert_close(got, want, tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def assert_replicas_agree(tree):
    for x in jax.tree.leaves(tree):
        by_index = {}
        for shard in x.addressable_shards:
            by_index.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
        assert all(len(values) == 1 for values in by_index.values())


@pytest.mark.parametrize(
    ("case", "dtype", "check_vma"),
    [
        pytest.param("parameter", "float32", False, marks=pytest.mark.slow),
        ("module", "float32", True),
        pytest.param("shape", "float64", True, marks=pytest.mark.slow),
        pytest.param("global", "float32", True, marks=pytest.mark.slow),
        pytest.param("callable", "float32", True, marks=pytest.mark.slow),
        pytest.param("full", "float32", False, marks=pytest.mark.slow),
        ("full", "float64", True),
    ],
)
def test_shard_map_with_axis_names_equals_one_device(case, dtype, check_vma):
    options = CASES[case]
    with jax.enable_x64(dtype == "float64"):
        bad = options.get("nonfinite") == "skip"
        params, grads = numbers(dtype, bad)
        want = by_one_device(case, dtype, bad)
        solver = kourkoutas_beta(1e-2, axis_name=SPECS, **options)
        got = train(mapped(solver, params, check_vma=check_vma), solver, params, grads)
        assert_close(got, want, TOLERANCE[dtype])
        assert_replicas_agree(got)
        assert all(np.isfinite(p).all() for p in got[0].values())
        if options.get("nonfinite") == "skip":
            assert int(jnp.sum(got[1][0].skipped)) == 1


def test_without_axis_names_norms_are_those_of_the_shards():
    params, grads = numbers("float32")
    solver = kourkoutas_beta(1e-2)
    with pytest.raises(Exception, match="out_specs"):
        train(mapped(solver, params), solver, params, grads)
    want = by_one_device("parameter")[1][0].ema
    got = train(mapped(solver, params, check_vma=False), solver, params, grads)[1][0].ema
    # dec.b, dec.w and enc.w are sharded; enc.b and gain are not.
    assert np.all(got[jnp.array([0, 1, 3])] < 0.9 * want[jnp.array([0, 1, 3])])
    np.testing.assert_allclose(got[jnp.array([2, 4])], want[jnp.array([2, 4])], rtol=2e-6)


@pytest.mark.parametrize(
    "axis_name",
    [
        lambda name, array: {"enc.w": "x", "dec.w": ("x", "y"), "dec.b": ("y", "x")}.get(name),
        {"enc.w": "x", "enc.b": (), "dec.w": ("y", "x"), "dec.b": ("x", "y"), "gain": None},
    ],
    ids=["callable", "tree of names"],
)
def test_names_may_come_from_a_callable_or_a_tree(axis_name):
    params, grads = numbers("float32")
    solver = kourkoutas_beta(1e-2, axis_name=axis_name, **CASES["full"])
    assert_close(train(mapped(solver, params), solver, params, grads), by_one_device("full"), 2e-6)


def test_one_name_for_all_parameters_and_missing_gradients():
    params = {"a": jnp.arange(8.0), "b": jnp.ones((16, 3))}
    grads = [{"a": jnp.ones(8), "b": None}, {"a": params["a"], "b": params["b"]}, {"a": None, "b": None}]
    specs = {"a": P("x"), "b": P("x")}
    alone, solver = (kourkoutas_beta(1e-2, buckets="global", axis_name=name) for name in (None, "x"))
    want = train(alone.update, alone, params, grads)
    state_specs = specs_of(solver, params, specs)

    def update(g, state, params):
        there = {name: specs[name] if g[name] is not None else None for name in specs}
        return jax.shard_map(
            solver.update, mesh=mesh(), in_specs=(there, state_specs, specs), out_specs=(specs, state_specs)
        )(g, state, params)

    assert_close(train(update, solver, params, grads), want, 2e-6)


def test_a_state_may_be_made_inside_shard_map():
    params, _ = numbers("float32")
    solver = kourkoutas_beta(1e-2, buckets="shape", axis_name=SPECS)
    state = specs_of(solver, params, SPECS)
    inside = jax.jit(jax.shard_map(solver.init, mesh=mesh(), in_specs=(SPECS,), out_specs=state))(params)
    assert_close(inside, solver.init(params), 0)


def test_huge_finite_gradients_do_not_overflow_over_the_devices_together():
    params = {"w": jnp.ones(1 << 16)}
    grads = {"w": jnp.full(1 << 16, 1e18)}  # Σg² = 6.6e40; of each of the four shards 1.6e40
    solver = kourkoutas_beta(1e-2, axis_name="x", alpha=0.5)
    _, state = mapped(solver, params, specs={"w": P("x")})(grads, solver.init(params), params)
    np.testing.assert_allclose(state[0].ema, [0.5 * 256e18], rtol=1e-6)


def test_what_axis_name_cannot_be_is_said():
    params, grads = numbers("float32")
    solver = kourkoutas_beta(1e-2, axis_name=SPECS)
    with pytest.raises(ValueError, match=r"`axis_name` names \['x', 'y'\], which are not all axes of a map"):
        solver.update(grads[0], solver.init(params), params)
    with pytest.raises(ValueError, match="`buckets` is 'shape', which needs the shapes of whole parameters"):
        kourkoutas_beta(1e-2, axis_name="x", buckets="shape").init(params)
    with pytest.raises(ValueError, match="`axis_name` must be a tree with the structure of the parameters"):
        kourkoutas_beta(1e-2, axis_name={"other": P("x")}).init(params)
    with pytest.raises(TypeError, match=r"`axis_name` must be the name of a mesh axis, a tuple of names.*; got 3"):
        kourkoutas_beta(1e-2, axis_name=3).init(params)
    # Whole shapes (8, 4) and (4, 16) are two buckets, shards of shape (2, 4) and (2, 4) would be one.
    hidden = {"enc.w": "x", "enc.b": None, "dec.w": ("x", "y"), "dec.b": ("x", "y"), "gain": None}
    solver = kourkoutas_beta(1e-2, axis_name=hidden, buckets=lambda name, array: array.shape)
    with pytest.raises(ValueError, match="the state has 5 buckets and the parameters have 4"):
        train(mapped(solver, params), solver, params, grads)


# Under jit


def placed(tree, specs, on):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(on, spec)), tree, specs)


def all_reduces(compiled):
    """All-reduces of a step that goes well: those outside of the branch for sums that overflow."""
    entry = compiled.as_text().split("ENTRY", 1)[1]
    return len(re.findall(r" all-reduce(?:-start)?\(", entry))


@pytest.mark.parametrize("case", [pytest.param("shape", marks=pytest.mark.slow), "full"])
def test_under_jit_sharded_arrays_give_the_numbers_of_one_device(case):
    params, grads = numbers("float32")
    solver = kourkoutas_beta(1e-2, **CASES[case])
    want = by_one_device(case)
    on = mesh()
    got = train(solver.update, solver, placed(params, SPECS, on), [placed(g, SPECS, on) for g in grads])
    assert_close(got, want, 2e-6)
    for name, spec in SPECS.items():
        assert got[1][0].mu[name].sharding.is_equivalent_to(NamedSharding(on, spec), len(SHAPES[name]))


@pytest.mark.parametrize("options", [{}, FULL], ids=["default", "full"])
def test_under_jit_a_step_sums_once_per_set_of_axes(options):
    params, grads = numbers("float32")
    on = mesh()
    solver = kourkoutas_beta(1e-2, **options)
    params, grads = placed(params, SPECS, on), placed(grads[0], SPECS, on)
    compiled = jax.jit(solver.update).lower(grads, jax.jit(solver.init)(params), params).compile()
    # enc.w over x; dec.w and dec.b over x and y, in either order
    assert all_reduces(compiled) == 3


def test_in_shard_map_a_step_sums_once_per_set_of_axes():
    params, grads = numbers("float32")
    for options in ({}, FULL):
        solver = kourkoutas_beta(1e-2, axis_name=SPECS, **options)
        compiled = mapped(solver, params).lower(grads[0], solver.init(params), params).compile()
        assert all_reduces(compiled) == 2  # over x; over x and y


# State: its sharding, in Optax's, linen's and NNX's terms, and from device to device through a checkpoint


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        shard = linen.with_partitioning
        init = linen.initializers.lecun_normal()
        x = linen.tanh(linen.Dense(32, kernel_init=shard(init, (None, "x")))(x))
        return linen.Dense(8, kernel_init=shard(init, ("x", "y")))(x)


def test_linens_partitioned_parameters_give_their_moments_the_same_sharding():
    on, model, x = mesh(), Mlp(), jnp.ones((4, 16))
    solver = kourkoutas_beta(1e-2, buckets="module", **FULL)

    def start():
        params = model.init(jax.random.key(0), x)
        return params, solver.init(params)

    specs = linen.get_partition_spec(jax.eval_shape(start))
    assert specs[1][0].mu["params"]["Dense_1"]["kernel"] == P("x", "y")
    assert specs[1][0].ema == P()
    shardings = jax.tree.map(lambda spec: NamedSharding(on, spec), specs)
    sharded = jax.jit(start, out_shardings=shardings)()

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: jnp.sum((model.apply(p, x) - 1) ** 2))(params)
        updates, state = solver.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    one, eight = start(), sharded
    for _ in range(5):
        one, eight = jax.block_until_ready((step(*one), step(*eight)))
    assert_close(linen.unbox(eight), linen.unbox(one), 5e-6)
    assert eight[1][0].mu["params"]["Dense_1"]["kernel"].value.sharding.spec == P("x", "y")


def test_nnx_trains_with_sharded_parameters_and_moments():
    on = mesh()

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), (16, 8)))
            self.bias = nnx.Param(jnp.zeros(8))

    def run(place):
        model = Net(nnx.Rngs(0))
        if place:
            model.kernel[...] = jax.device_put(model.kernel[...], NamedSharding(on, P("x", "y")))
            model.bias[...] = jax.device_put(model.bias[...], NamedSharding(on, P()))
        optimizer = nnx.Optimizer(model, kourkoutas_beta(1e-2, buckets="module", **FULL), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            def loss(m):
                return jnp.sum((jnp.ones((4, 16)) @ m.kernel[...] + m.bias[...] - 1) ** 2)

            optimizer.update(model, nnx.grad(loss)(model))

        for _ in range(5):
            step(model, optimizer)
            jax.block_until_ready(model.kernel[...])
        return model, optimizer

    (one, _), (eight, optimizer) = run(place=False), run(place=True)
    np.testing.assert_allclose(eight.kernel[...], one.kernel[...], rtol=2e-6, atol=2e-6)
    moment = optimizer.opt_state[0].mu["kernel"][...]
    assert moment.sharding.is_equivalent_to(NamedSharding(on, P("x", "y")), 2)


@pytest.mark.parametrize("case", [pytest.param("parameter", marks=pytest.mark.slow), "full"])
def test_a_checkpoint_of_eight_devices_continues_on_four_and_on_one(tmp_path, case):
    params, grads = numbers("float32")
    solver = kourkoutas_beta(1e-2, **CASES[case])
    want = by_one_device(case)
    specs = (SPECS, specs_of(solver, params, SPECS))

    def on(count):
        grid = np.array(jax.devices()[:count]).reshape(max(count // 2, 1), min(count, 2))
        return jax.tree.map(lambda spec: NamedSharding(jax.sharding.Mesh(grid, ("x", "y")), spec), specs)

    run = jax.tree.map(jax.device_put, (params, solver.init(params)), on(8))

    @jax.jit
    def step(params, state, g):
        updates, state = solver.update(g, state, params)
        return optax.apply_updates(params, updates), state

    plan = {8: slice(0, 7), 4: slice(7, 14), 1: slice(14, STEPS)}
    for count, part in plan.items():
        shardings = on(count)
        with orbax.checkpoint.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / f"to{count}", run)
            checkpointer.wait_until_finished()
            target = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), run, shardings
            )
            params, state = checkpointer.restore(tmp_path / f"to{count}", target)
        assert len(params["enc.w"].sharding.device_set) == count
        for g in grads[part]:
            g = jax.tree.map(jax.device_put, g, shardings[0])
            params, state = jax.block_until_ready(step(params, state, g))
        run = (params, state)
    assert_close(run, want, 2e-6)


def test_there_are_eight_devices():
    assert jax.device_count() == 8
