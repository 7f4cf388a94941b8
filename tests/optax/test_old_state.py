"""State saved by earlier versions loads and goes on to the same numbers; in 0.1 `count` was one per parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import serialization

from kourkoutas.optax import KourkoutasBetaState, kourkoutas_beta, load_state
from tests.old_state import write


def saved(case):
    return serialization.msgpack_restore((write.folder_of(case) / f"optax-{case}.msgpack").read_bytes())


def like(case):
    solver = kourkoutas_beta(write.LR, **write.options_of(case))
    return solver, solver.init({name: jnp.asarray(x) for name, x in write.params().items()})


@pytest.mark.parametrize("case", [*write.CASES, *write.LATER])
def test_training_goes_on_to_the_same_parameters(case):
    with np.load(write.folder_of(case) / f"params-optax-{case}.npz") as file:
        before, after = ({name: file[f"{when}/{name}"] for name in write.SHAPES} for when in ("before", "after"))
    solver, fresh = like(case)
    state = load_state(saved(case), fresh)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    # "skip" met a NaN in enc.bias before the save, the third of the names in sorted order, and "everything" in the
    # bucket of that and enc.weight.
    assert int(optax.tree.get(state, "count")) == write.FIRST
    assert state[0].missed.tolist() == {"skip": [0, 0, 1, 0], "everything": [0, 0, 1, 1]}.get(case, [0] * 4)
    update = jax.jit(solver.update)
    params = before
    for g in write.grads(case)[write.FIRST :]:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    for name, expected in after.items():
        np.testing.assert_allclose(params[name], expected, rtol=2e-6, atol=2e-6, err_msg=name)


def test_a_state_of_this_version_comes_back_bit_for_bit(tmp_path):
    solver, state = like("skip")
    grads = write.grads("skip")[3]
    _, state = solver.update(grads, state, write.params())
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state")
    for form in (serialization.to_state_dict(state), serialization.msgpack_restore(serialization.to_bytes(state))):
        loaded = load_state(form, jax.eval_shape(lambda: like("skip")[1]))
        assert isinstance(loaded[0], KourkoutasBetaState)
        for got, want in zip(jax.tree.leaves(loaded), jax.tree.leaves(state), strict=True):
            assert got.dtype == want.dtype
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
    for got, want in zip(jax.tree.leaves(load_state(restored, like("skip")[1])), jax.tree.leaves(state), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_a_saved_state_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"nothing at \[0\].nu_max\['dec.bias'\]: load it with the parameters and the"):
        load_state(saved("default"), like("full")[1])
    with pytest.raises(ValueError, match=r"`saved` has shape \(1,\) at \[0\].ema and `like` has \(4,\)"):
        load_state(saved("global"), like("default")[1])


def test_a_state_of_version_0_1_that_was_not_loaded_is_refused_by_a_step():
    solver, state = like("default")
    old = serialization.from_state_dict(state[0], {**saved("default")["0"], "missed": np.zeros(4, np.int32)})
    with pytest.raises(ValueError, match=r"`count` must be a number; got shape \(4,\), as version 0.1 kept it: load"):
        solver.update(write.params(), (old, *state[1:]), write.params())
