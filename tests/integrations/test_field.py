"""K-β in PINA, neuraloperator, PhysicsNeMo, jinns, torchphysics: it learns, finds unknowns, resumes to the same bit."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.integrations.test_examples import load
from tests.integrations.test_resume import same, state_of

torch = pytest.importorskip("torch")

from kourkoutas.torch import KourkoutasBeta  # noqa: E402

PAGE = (Path(__file__).parents[2] / "docs" / "pinns.md").read_text(encoding="utf-8")


def test_pina_hands_over_to_lbfgs_which_lowers_the_loss():
    pytest.importorskip("pina")
    before, after = load("pina_switch").main(60)
    assert after < 0.5 * before


def test_pina_resumes_bit_for_bit_with_one_bucket_a_module(tmp_path):
    pytest.importorskip("pina")
    example = load("pina_switch")

    def fit(epochs, checkpoint=None, save=None):
        it = example.solver()
        trainer = example.trainer(it, epochs)
        trainer.fit(it, datamodule=trainer.data_module, ckpt_path=checkpoint, weights_only=False)
        if save is not None:
            trainer.save_checkpoint(save)
        return state_of(it, trainer.optimizers[0]), trainer.optimizers[0]

    expected, optimizer = fit(6)
    fit(3, save=tmp_path / "half.ckpt")
    assert len(optimizer.bucket_names) == 3  # three layers of weight and bias
    assert int(expected["0/step"]) == 6
    same(fit(6, checkpoint=tmp_path / "half.ckpt")[0], expected)


def test_in_pina_an_unknown_of_the_problem_is_no_module_of_the_model():
    pina = pytest.importorskip("pina")
    from pina.domain import CartesianDomain
    from pina.model import FeedForward
    from pina.optim import TorchOptimizer
    from pina.problem import InverseProblem, SpatialProblem
    from pina.solver import PhysicsInformedSingleModelSolver

    from kourkoutas.buckets import by_module

    class Unknown(SpatialProblem, InverseProblem):
        output_variables = ["u"]  # noqa: RUF012
        spatial_domain = CartesianDomain({"x": [0, 1]})
        unknown_parameter_domain = CartesianDomain({"a": [0, 1]})
        conditions = {  # noqa: RUF012
            "seen": pina.Condition(
                input=pina.LabelTensor(torch.rand(3, 1), ["x"]), target=pina.LabelTensor(torch.rand(3, 1), ["u"])
            )
        }

    def optimizer(**options):
        model = FeedForward(input_dimensions=1, output_dimensions=1, layers=[4])
        buckets = options.get("buckets") or by_module(model)
        solver = PhysicsInformedSingleModelSolver(
            Unknown(), model, optimizer=TorchOptimizer(KourkoutasBeta, lr=1e-2, buckets=buckets)
        )
        return solver.configure_optimizers()[0][0]

    assert len(optimizer(buckets="shape").param_groups) == 2
    with pytest.raises(ValueError, match="by_module"):
        optimizer()


@pytest.mark.parametrize(
    ("package", "name", "complex_weights"), [("neuralop", "neuralop_fno", 2), ("physicsnemo", "physicsnemo_fno", 0)]
)
def test_an_fno_learns_and_resumes_bit_for_bit(tmp_path, package, name, complex_weights):
    pytest.importorskip(package)
    example = load(name)
    model, optimizer = example.fresh()
    assert sum(p.is_complex() for p in model.parameters()) == complex_weights
    start = example.train(model, optimizer, 1)
    half = example.train(model, optimizer, 19)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "half.pt")
    end = example.train(model, optimizer, 20)
    assert end < half < 0.5 * start
    again, second = example.fresh()
    saved = torch.load(tmp_path / "half.pt", weights_only=False)
    again.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    example.train(again, second, 20)
    expected = state_of(model, optimizer)
    assert int(expected["0/step"]) == 40
    same(state_of(again, second), expected)


def test_torchphysics_finds_the_unknown():
    pytest.importorskip("torchphysics")
    loss, unknown = load("torchphysics_poisson").main(300)
    assert loss < 0.01
    assert abs(unknown - 1) < 0.1  # it starts at 0.5


def test_torchphysics_resumes_bit_for_bit(tmp_path):
    pytest.importorskip("torchphysics")
    example = load("torchphysics_poisson")

    def fit(steps, checkpoint=None, save=None):
        it, trainer = example.solver(), example.trainer(steps)
        trainer.fit(it, ckpt_path=checkpoint)
        if save is not None:
            trainer.save_checkpoint(save)
        return state_of(it, trainer.optimizers[0])

    expected = fit(20)
    fit(10, save=tmp_path / "half.ckpt")
    assert 20 in {int(x) for name, x in expected.items() if name.endswith("/step")}
    same(fit(20, checkpoint=tmp_path / "half.ckpt"), expected)


def test_the_eigenbasis_learns_in_pina():
    pytest.importorskip("pina")
    example = load("pina_switch")

    def loss_after(epochs):
        it = example.solver("eigen")
        example.trainer(it, epochs).train()
        assert it.optimizer.instance.route()[0].name == "eigenbasis"
        return float(it.trainer.callback_metrics["train_loss"])

    assert loss_after(150) < 0.5 * loss_after(2)


def test_the_eigenbasis_learns_the_complex_weights_of_an_fno():
    pytest.importorskip("neuralop")
    example = load("neuralop_fno")
    model, optimizer = example.fresh("eigen")
    assert example.train(model, optimizer, 200) < 0.1  # it begins at 15
    complex_weights = [p for p in model.parameters() if p.is_complex() and p.ndim > 1]
    assert all("basis_0" in optimizer.state[p] for p in complex_weights)


@pytest.fixture(scope="module")
def decay():
    pytest.importorskip("jinns")
    return load("jinns_solve")


def test_jinns_finds_the_unknown(decay):
    loss, a = decay.main(500)
    assert loss < 0.01
    assert abs(a - 2) < 0.3  # it starts at 0.5


def test_the_eigenbasis_finds_the_unknown_in_jinns(decay):
    import jinns

    from kourkoutas.optax import kourkoutas_beta

    optimizer = kourkoutas_beta(1e-2, bias_correction="exact", basis="eigen")
    params, losses, *_ = jinns.solve(n_iter=500, optimizer=optimizer, verbose=False, **decay.problem())
    assert losses[-1] < 0.01
    assert abs(float(params.eq_params.a) - 2) < 0.3


def test_jinns_goes_on_from_its_state_bit_for_bit_and_names_the_buckets(decay):
    import jax
    import jinns
    import numpy as np

    def solve(steps, **more):
        out = jinns.solve(n_iter=steps, optimizer=decay.optimizer, verbose=False, **{**decay.problem(), **more})
        return out[0], out[5]

    whole = solve(20)
    params, state = solve(10)
    again = solve(10, init_params=params, opt_state=state)
    a, b = jax.tree.leaves(whole), jax.tree.leaves(again)
    assert len(a) == len(b) > 20
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))
    assert not np.array_equal(a[0], jax.tree.leaves(params)[0])


def test_pytorch_optimizer_lists_kbeta_and_makes_it_by_name():
    pytest.importorskip("pytorch_optimizer")
    from pytorch_optimizer import create_optimizer, get_supported_optimizers, load_optimizer

    assert load("pytorch_optimizer_registry").main(200) < 0.3  # the variance of sin(2x) is 0.5
    assert get_supported_optimizers("kbeta") == ["kbeta"]
    assert load_optimizer("KBeta") is KourkoutasBeta
    optimizer = create_optimizer(torch.nn.Linear(2, 2), "kbeta", lr=0.5, weight_decay=0.25, alpha=0.9)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]  # none for the bias
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}
    assert {group["alpha"] for group in optimizer.param_groups} == {0.9}


def test_timm_makes_kbeta_from_its_dotted_name():
    pytest.importorskip("timm")
    from timm.optim import create_optimizer_v2, list_optimizers
    from timm.optim._optim_factory import OptimInfo, default_registry

    default_registry.register(OptimInfo(name="kbetadotted", opt_class="kourkoutas.torch.KourkoutasBeta"))
    assert "kbetadotted" in list_optimizers()
    optimizer = create_optimizer_v2(torch.nn.Linear(2, 2), opt="kbetadotted", lr=0.5, weight_decay=0.25, eps=1e-6)
    assert isinstance(optimizer, KourkoutasBeta)
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6}


def rows(title: str) -> list[list[str]]:
    """The table of the page below a heading, without its head."""
    table = re.search(rf"^## {title}$.*?^\|[-|]+\|$\n((?:^\|[^\n]*\n)+)", PAGE, re.MULTILINE | re.DOTALL)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


@pytest.mark.parametrize(("package", "said"), [row[:2] for row in rows("Versions")])
def test_the_page_names_the_versions_that_these_tests_ran_with(package, said):
    assert version(package.strip("`")) == said


def test_the_hidden_warmup_is_as_large_as_the_page_says():
    """Both optimizers see the same gradients, so m, v and β2 are the same and only the correction differs."""
    settings = (Path(__file__).parents[2] / "docs" / "settings.md").read_text(encoding="utf-8")
    steps, _, shares = re.findall(r"^\|.*\|$", settings.split("## The hidden warmup")[1], re.MULTILINE)[:3]
    pairs = zip(steps.split("|")[3:-1], shares.split("|")[3:-1], strict=True)  # without the first step, a spike or not
    said = {int(t.replace(",", "")): float(share.strip(" %")) / 100 for t, share in pairs}
    assert {60, 300, 1000, 3000} <= set(said)
    generator = torch.Generator().manual_seed(0)
    moved = {}
    ways = {
        way: KourkoutasBeta([torch.nn.Parameter(torch.zeros(64, dtype=torch.float64))], lr=1, bias_correction=way)
        for way in ("beta2max", "exact")
    }
    for t in range(1, 3001):
        gradient = torch.randn(64, generator=generator, dtype=torch.float64)
        for way, optimizer in ways.items():
            (theta,) = optimizer.param_groups[0]["params"]
            before, theta.grad = theta.detach().clone(), gradient.clone()
            optimizer.step()
            moved[way] = (theta.detach() - before).norm().item()
        if t in said:
            assert moved["beta2max"] / moved["exact"] == pytest.approx(said[t], rel=0.02), t
