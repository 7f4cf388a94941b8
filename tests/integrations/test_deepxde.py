"""K-β in DeepXDE, which has one backend per process: PyTorch here, JAX in processes of its own."""

import os
import subprocess
import sys

import pytest

from tests.integrations.test_examples import EXAMPLES, load
from tests.integrations.test_resume import same, state_of

if os.environ.setdefault("DDE_BACKEND", "pytorch") != "pytorch":
    pytest.skip("these tests want DDE_BACKEND=pytorch", allow_module_level=True)
torch = pytest.importorskip("torch")
pytest.importorskip("deepxde")

from kourkoutas.torch import KourkoutasBeta  # noqa: E402


@pytest.fixture(scope="module")
def example():
    return load("deepxde_burgers")


def tensors(model, nu):
    return state_of(model.net, model.opt) | {"nu": nu.detach().clone()}


def test_the_unknown_is_found_and_lbfgs_lowers_the_loss_that_kbeta_reached(example):
    before, after, nu = example.main(500)
    assert after < before < 0.01  # an untrained network is near 0.3
    assert abs(nu - 0.05) < 0.03  # it starts at 0.2


def test_the_eigenbasis_finds_the_unknown(example):
    model, nu = example.problem()
    example.with_kbeta(model, nu, "eigen")
    history, _ = model.train(iterations=500, verbose=0)
    assert sum(history.loss_train[-1]) < 0.01
    assert abs(nu.item() - 0.05) < 0.03


def test_an_unknown_that_is_not_among_the_parameters_stays_where_it_started(example):
    model, nu = example.problem()
    start = [p.detach().clone() for p in model.net.parameters()]
    model.compile(KourkoutasBeta(model.net.named_parameters(), lr=1e-2), external_trainable_variables=[nu])
    model.train(iterations=10, verbose=0)
    assert torch.equal(nu, torch.tensor(0.2))
    assert not any(torch.equal(a, b) for a, b in zip(start, model.net.parameters(), strict=True))


def test_names_are_given_for_all_parameters_or_for_none(example):
    model, nu = example.problem()
    with pytest.raises(ValueError, match="with/without names"):
        KourkoutasBeta([*model.net.named_parameters(), nu])
    assert len(KourkoutasBeta([*model.net.parameters(), nu]).bucket_names) == 7


def test_a_saved_run_goes_on_to_the_same_bits_over_a_step_of_the_schedule(example, tmp_path):
    def start():
        model, nu = example.problem()
        example.with_kbeta(model, nu)
        return model, nu

    whole = start()
    whole[0].train(iterations=220, verbose=0)
    first = start()
    first[0].train(iterations=120, verbose=0)
    saved = example.save(*first, str(tmp_path / "half"))
    again = start()
    example.restore(*again, str(tmp_path / "half"), saved)
    again[0].train(iterations=100, verbose=0)
    expected = tensors(*whole)
    assert int(expected["0/step"]) == 220
    assert whole[0].opt.param_groups[0]["lr"] == again[0].opt.param_groups[0]["lr"] == pytest.approx(0.7 * 5e-3)
    same(tensors(*again), expected)


def test_on_jax_it_solves_the_equation_and_deepxde_saves_nothing():
    pytest.importorskip("flax")
    source = f"""
import runpy
example = runpy.run_path({str(EXAMPLES / "deepxde_jax.py")!r})
error = example["main"](400)
model = example["problem"]()
model.compile(example["kourkoutas_beta"](1e-2))
try:
    model.save("nowhere")
except NotImplementedError:
    print(f"not saved: {{error}}")
"""
    env = {**os.environ, "DDE_BACKEND": "jax"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr
    said, _, error = done.stdout.splitlines()[-1].partition(": ")
    assert said == "not saved"
    assert float(error) < 0.05  # the solution reaches 1
