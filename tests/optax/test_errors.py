"""Bad input: the argument, the value and the remedy."""

import subprocess
import sys

import jax.numpy as jnp
import optax
import pytest

from kourkoutas.optax import bucket_names, kourkoutas_beta, scale_by_kourkoutas_beta


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": -1.0}, r"`learning_rate` must be a finite number >= 0.*got -1\.0"),
        ({"beta1": 1.0}, r"`beta1` must be in \[0, 1\).*got 1\.0"),
        ({"beta2_min": 0.99, "beta2_max": 0.9}, "`beta2_min` must not exceed `beta2_max`"),
        ({"alpha": 0.0}, r"`alpha` must be in \(0, 1\)"),
        ({"decay": 1.5}, "`decay` must be None"),
        ({"max_ratio": 0.0}, "`max_ratio` must be None or > 0"),
        ({"weight_decay": -0.1}, r"`weight_decay` must be a finite number >= 0; got -0\.1"),
        ({"bias_correction": "adam"}, "`bias_correction` must be one of"),
        ({"nonfinite": "ignore"}, "`nonfinite` must be one of"),
        ({"buckets": "modul"}, 'did you mean "module"'),
    ],
)
def test_bad_hyperparameters_are_refused_when_the_optimizer_is_built(options, message):
    with pytest.raises(ValueError, match=message):
        kourkoutas_beta(**{"learning_rate": 1e-3, **options})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kourkoutas_beta(1e-3, b1=0.8), r"no argument `b1`; got 0\.8: write beta1=0\.8"),
        (lambda: kourkoutas_beta(1e-3, b2=0.99), r"`b2`; got 0\.99: .*write beta2_max=0\.99, and beta2_min=0\.99 too"),
        (lambda: kourkoutas_beta(1e-3, eps_root=1e-8), "`eps_root`; got 1e-08: .*leave it out"),
        (lambda: kourkoutas_beta(1e-3, mu_dtype="bfloat16"), "`mu_dtype`; got 'bfloat16': .*leave it out"),
        (lambda: kourkoutas_beta(1e-3, nesterov=True), "`nesterov`; got True: .*leave it out"),
        (lambda: kourkoutas_beta(lr=1e-3), r"`lr`; got 0\.001: write learning_rate=0\.001"),
        (lambda: kourkoutas_beta(1e-3, 0.9, 0.999), r"only `learning_rate` by position; got also 0\.9: write its name"),
        (lambda: scale_by_kourkoutas_beta(b1=0.8), r"no argument `b1`; got 0\.8: write beta1=0\.8"),
        (lambda: scale_by_kourkoutas_beta(0.9, 0.999), r"takes nothing by position; got also 0\.9: write its name"),
    ],
)
def test_what_users_of_optax_adam_type_is_refused_in_one_line_with_the_remedy(call, message):
    with pytest.raises(TypeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_other_unknown_arguments_get_pythons_own_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'gamma'"):
        kourkoutas_beta(1e-3, gamma=0.9)


@pytest.mark.parametrize(
    ("solver", "option"),
    [
        (scale_by_kourkoutas_beta(adaptive_tiny=True), "`adaptive_tiny` is True"),
        (kourkoutas_beta(1e-3, adaptive_tiny=True), "`adaptive_tiny` is True"),
        (kourkoutas_beta(1e-3, weight_decay=0.1), "`weight_decay` is 0.1"),
        (kourkoutas_beta(1e-3, weight_decay=optax.constant_schedule(0.1)), "`weight_decay` is a schedule"),
    ],
)
def test_an_option_that_reads_the_parameters_says_what_to_do_without_them(solver, option):
    params = {"w": jnp.ones(2)}
    remedy = r"call update\(grads, state, params\); where a library makes the call, as DeepXDE does on JAX, leave"
    with pytest.raises(ValueError, match=f"^{option}, which needs the parameters, .*{remedy}"):
        solver.update(params, solver.init(params))


def test_the_parameters_are_not_needed_without_adaptive_tiny_and_weight_decay():
    params = {"w": jnp.ones(2)}
    solver = kourkoutas_beta(1e-3)
    updates, _ = solver.update(params, solver.init(params))
    assert updates["w"].shape == (2,)


@pytest.mark.parametrize(
    ("grads", "message"),
    [
        ({"enc": {"w": jnp.ones(2)}, "out": jnp.ones(3)}, "'enc.w' in the gradients, 'enc.b' in the parameters"),
        ({"enc": {"b": jnp.ones(1), "w": jnp.ones(2)}}, "nothing in the gradients, 'out' in the parameters"),
        (
            {"enc": {"b": jnp.ones(1), "w": jnp.ones(2)}, "out": jnp.ones(3), "z": jnp.ones(1)},
            "'z' in the gradients, nothing in the parameters",
        ),
        ({"enc": None, "out": jnp.ones(3)}, "'enc.b' in the parameters"),
        ({"enc": {"b": jnp.ones(1), "w": jnp.ones((2, 1))}, "out": jnp.ones(3)}, r"'enc.w' must have the shape \(2,\)"),
    ],
    ids=["left out", "too few", "too many", "subtree", "shape"],
)
def test_a_gradient_tree_that_does_not_match_names_the_first_path(grads, message):
    params = {"enc": {"b": jnp.ones(1), "w": jnp.ones(2)}, "out": jnp.ones(3)}
    solver = kourkoutas_beta(1e-3)
    with pytest.raises(ValueError, match=message):
        solver.update(grads, solver.init(params), params)


def test_a_gradient_for_something_that_is_no_parameter_is_named():
    solver = kourkoutas_beta(1e-3)
    state = solver.init({"a": None, "w": jnp.ones(2)})
    with pytest.raises(ValueError, match="'a' in the gradients, nothing in the parameters"):
        solver.update({"a": jnp.ones(1), "w": jnp.ones(2)}, state)


def test_integer_parameters_are_refused_by_name():
    with pytest.raises(TypeError, match=r"got int32 at 'embed\.ids'"):
        kourkoutas_beta(1e-3).init({"embed": {"ids": jnp.arange(3)}})


def test_an_unhashable_bucket_key_is_refused_by_name():
    with pytest.raises(TypeError, match=r"hashable key.*'w'"):
        kourkoutas_beta(1e-3, buckets=lambda name, array: [name]).init({"w": jnp.ones(2)})


@pytest.mark.parametrize(
    ("buckets", "names"),
    [
        ("parameter", ("enc.0.w", "enc.1.w", "out")),
        ("module", ("enc.0", "enc.1", "")),
        ("shape", ("(2,)", "(3,)")),
        ("global", ("all",)),
        (lambda name, array: array.dtype.name, ("float32",)),
    ],
)
def test_bucket_names_come_from_key_paths(buckets, names):
    params = {"enc": [{"w": jnp.ones(2)}, {"w": jnp.ones(3)}], "out": jnp.ones(2)}
    assert bucket_names(params, buckets) == names


def test_paths_that_read_the_same_keep_buckets_of_their_own():
    assert len(bucket_names({"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}})) == 2


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_a_missing_framework_is_one_line_that_names_the_extra(missing):
    code = f"import sys; sys.modules[{missing!r}] = None\nimport kourkoutas.optax"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: kourkoutas.optax needs JAX and Optax: pip install 'kourkoutas-beta[jax]'"
    )
    assert "During handling" not in done.stderr


def test_a_state_of_other_buckets_and_axes_that_nobody_maps_over_are_refused():
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = kourkoutas_beta(0.1, buckets="global").init(params)
    with pytest.raises(ValueError, match="the state has 1 buckets and the parameters have 2: call init"):
        kourkoutas_beta(0.1).update(params, state, params)
    spread = kourkoutas_beta(0.1, axis_name="data")
    with pytest.raises(ValueError, match=r"`axis_name` names \['data'\], which are not all axes of a map"):
        spread.update(params, spread.init(params), params)
    with pytest.raises(ValueError, match="`buckets` is 'shape', which needs the shapes of whole parameters"):
        kourkoutas_beta(0.1, axis_name="data", buckets="shape").init(params)
