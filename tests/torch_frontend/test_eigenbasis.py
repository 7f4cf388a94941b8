"""`basis="eigen"` in PyTorch beyond the conformance table: numerics, resuming, compiling, and how it meets the rest."""

import copy
import io

import numpy as np
import pytest
import torch
import torch._dynamo.testing

from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper
from kourkoutas.torch import KourkoutasBeta, kernel, rotation
from kourkoutas.trace import Trace

SQUARES = {"a": (5, 5), "b": (5, 5), "c": (5,), "d": (3, 2, 3)}


def gradients(shapes, steps, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}
        for _ in range(steps)
    ]


def parameters(shapes, dtype=torch.float32):
    return {name: torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for name, shape in shapes.items()}


def feed(optimizer, params, grads):
    for step in grads:
        for name, g in step.items():
            params[name].grad = g.clone()
        optimizer.step()


def eigen(params, **options):
    return KourkoutasBeta(params.items(), **{"lr": 1e-2, "basis": "eigen", "basis_every": 4, **options})


@pytest.mark.parametrize("options", [{}, {"decay": 0.98, "max_ratio": 3, "nonfinite": "skip", "weight_decay": 0.1}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_a_resumed_run_has_the_same_bits(dtype, options):
    params = parameters(SQUARES, dtype)
    optimizer = eigen(params, **options)
    grads = gradients(SQUARES, 23, dtype=dtype)
    feed(optimizer, params, grads[:10])  # between two turns
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    again = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    feed(optimizer, params, grads[10:])

    file.seek(0)
    resumed = eigen(again)
    resumed.load_state_dict(torch.load(file))
    feed(resumed, again, grads[10:])
    for name in params:
        assert torch.equal(params[name], again[name])


def test_beta2_is_that_of_the_gradient_in_its_own_coordinates():
    grads = gradients(SQUARES, 12)
    grads[7] = {name: 100 * g for name, g in grads[7].items()}
    traces = []
    for basis in (None, "eigen"):
        params = parameters(SQUARES)
        optimizer = eigen(params, basis=basis, diagnostics=True)
        feed(optimizer, params, grads)
        trace = Trace(optimizer.bucket_names)
        optimizer.pull(trace)
        traces.append(trace)
    for key in ("sun", "beta2"):
        np.testing.assert_allclose(getattr(traces[0], key), getattr(traces[1], key), rtol=1e-6)


def test_parameters_that_step_one_by_one_end_where_they_end_together():
    grads = gradients(SQUARES, 14)
    together, apart = parameters(SQUARES), parameters(SQUARES)
    feed(eigen(together), together, grads)
    optimizer = eigen(apart)
    for step in grads:
        for name, g in step.items():
            apart[name].grad = g.clone()
            optimizer.step()
            apart[name].grad = None
    for name in SQUARES:
        torch.testing.assert_close(together[name], apart[name], rtol=0, atol=1e-6)


def test_gradients_that_are_diagonal_in_one_fixed_frame_are_stepped_in_that_frame():
    # G = U·D·Vᵀ with diagonal D: in the basis it is D, so θ moves as U·(K-β of D)·Vᵀ from the second gradient on.
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(4, 4))).Q for _ in range(2))
    diagonals = [np.diag([8.0, 4.0, 2.0, 1.0] * rng.uniform(0.9, 1.1, 4)) for _ in range(12)]
    params = {"w": torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))}
    # Off the diagonal there are rounding errors, which a large ε keeps small; without a memory of norms, the gradient
    # that only one of the two optimizers has seen makes no difference.
    optimizer = eigen(params, alpha=1e-12, eps=1e-3, basis_every=3)
    plain = Oracle({"w": np.zeros((4, 4))}, Hyper(alpha=1e-12, eps=1e-3, beta1=0.95, bias_correction="exact"), lr=1e-2)
    for d in diagonals[1:]:
        plain.step({"w": d})
    feed(optimizer, params, [{"w": torch.from_numpy(u @ d @ v.T)} for d in diagonals])
    np.testing.assert_allclose(params["w"].detach().numpy(), u @ plain.params["w"] @ v.T, atol=1e-9)


def test_the_first_gradient_moves_nothing_and_is_no_step():
    params = parameters(SQUARES)
    optimizer = eigen(params, bias_correction="exact")
    feed(optimizer, params, gradients(SQUARES, 1))
    for p in params.values():
        assert torch.equal(p, torch.ones_like(p))
        assert optimizer.state[p]["step"] == 0
        assert optimizer.state[p]["norm_ema"] > 0


@pytest.mark.parametrize("size", [1e-20, 1e20], ids=str)
def test_tiny_and_huge_gradients_keep_basis_and_parameters_finite(size):
    params = parameters(SQUARES)
    optimizer = eigen(params)
    feed(optimizer, params, [{name: size * g for name, g in step.items()} for step in gradients(SQUARES, 12)])
    feed(optimizer, params, gradients(SQUARES, 12, seed=1))
    for p in params.values():
        assert p.isfinite().all()
    check_orthogonal(optimizer, params, 1e-5)


def check_orthogonal(optimizer, params, tolerance):
    for p in params.values():
        for name, q in optimizer.state[p].items():
            if name.startswith("basis_"):
                error = (q.mT.double() @ q.double() - torch.eye(len(q))).abs().max()
                assert error < tolerance, (name, error)


@pytest.mark.parametrize(
    "make",
    [
        lambda shape, t: torch.zeros(shape),
        lambda shape, t: torch.ones(shape),
        lambda shape, t: torch.zeros(shape) if t < 9 else torch.randn(shape),
        lambda shape, t: torch.diag(torch.tensor([1.0, 1.0, 1.0, 1e-6, 0.0])),
    ],
    ids=["zero", "rank one", "zero at first", "equal eigenvalues"],
)
def test_factors_without_full_rank_keep_the_basis_orthogonal(make):
    params = {"w": torch.nn.Parameter(torch.ones(5, 5))}
    optimizer = eigen(params)
    feed(optimizer, params, [{"w": make((5, 5), t)} for t in range(30)])
    assert params["w"].isfinite().all()
    check_orthogonal(optimizer, params, 1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_of_an_embedding_most_of_whose_rows_are_zero_has_a_basis(seed):
    generator = torch.Generator().manual_seed(seed)
    grad = torch.zeros(237, 64)
    grad[torch.randperm(237, generator=generator)[:48]] = torch.randn(48, 64, generator=generator)
    params = parameters({"w": (237, 64)})
    optimizer = eigen(params)
    feed(optimizer, params, [{"w": grad}] * 6)
    assert params["w"].isfinite().all()
    check_orthogonal(optimizer, params, 1e-4)


@pytest.mark.parametrize("shape", [(1, 6), (6, 1), (1, 1), (0, 3), (3, 0), (), (2, 1, 3, 1)], ids=str)
def test_odd_shapes_step(shape):
    params = parameters({"w": shape})
    optimizer = eigen(params)
    feed(optimizer, params, gradients({"w": shape}, 12))
    assert params["w"].isfinite().all()
    if params["w"].numel():
        assert not torch.equal(params["w"], torch.ones(shape))
    check_orthogonal(optimizer, params, 1e-5)


def orthogonality_after(steps):
    """Gradients whose eigenvectors cross: two directions exchange their sizes again and again."""
    params = {"w": torch.nn.Parameter(torch.zeros(6, 6))}
    optimizer = eigen(params, lr=1e-3, basis_every=10)
    generator = torch.Generator().manual_seed(0)
    frame = torch.linalg.qr(torch.randn(6, 6, generator=generator)).Q
    for t in range(steps):
        sizes = torch.ones(6)
        sizes[t // 100 % 6] = 30.0
        params["w"].grad = frame @ torch.diag(sizes) @ torch.randn(6, 6, generator=generator)
        optimizer.step()
    check_orthogonal(optimizer, params, 1e-5)
    assert params["w"].isfinite().all()


def test_the_basis_stays_orthogonal_while_eigenvectors_cross():
    orthogonality_after(2_000)


needs_lapack = pytest.mark.skipif(not kernel.has_lapack, reason="no C kernel, or no LAPACK in this torch")


def factors_and_bases(length, dtype, count=5):
    """Factors whose eigenvalues the bases know in no order."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(count, length, 2 * length, generator=generator, dtype=dtype)
    bases = torch.linalg.qr(torch.randn(count, length, length, generator=generator, dtype=dtype)).Q.contiguous()
    return x @ x.mT, bases


@needs_lapack
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", [1, 2, 7, 64, 130])
def test_the_kernel_turns_bases_as_torch_does(length, dtype):
    factors, bases = factors_and_bases(length, dtype)
    want, want_order = rotation.turned(factors, bases)
    order = torch.empty(bases.shape[:2], dtype=torch.int64)
    kernel.extension.turn(factors @ bases, bases, order, 2)
    assert torch.equal(order, want_order)
    torch.testing.assert_close(bases, want, rtol=0, atol=200 * torch.finfo(dtype).eps)


@needs_lapack
def test_a_turned_basis_has_the_same_bits_on_any_number_of_threads():
    factors, before = factors_and_bases(96, torch.float32)
    product, found = factors @ before, []
    for threads in (1, 2, 8):
        found.append(before.clone())
        kernel.extension.turn(product, found[-1], torch.empty(before.shape[:2], dtype=torch.int64), threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_lapack
def test_columns_with_equal_eigenvalues_or_none_keep_their_order():
    values = torch.tensor([[1.0, 3.0, 1.0, 3.0], [torch.nan, 1.0, torch.nan, 2.0]])
    bases, order = torch.eye(4).repeat(2, 1, 1), torch.empty(2, 4, dtype=torch.int64)
    kernel.extension.turn(torch.diag_embed(values), bases, order, 1)
    assert order[0].tolist() == [1, 3, 0, 2]
    assert sorted(order[1].tolist()) == [0, 1, 2, 3]


@needs_lapack
@pytest.mark.parametrize(
    "order", [torch.empty(2, 4), torch.empty(2, 3, dtype=torch.int64), torch.empty(4, 2, dtype=torch.int64).T]
)
def test_the_kernel_turns_nothing_into_memory_that_does_not_fit(order):
    bases = torch.eye(4).repeat(2, 1, 1)
    with pytest.raises(ValueError, match=r"`turn` takes square matrices of one kind, and int64"):
        kernel.extension.turn(bases.clone(), bases, order, 1)


@needs_lapack
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 70), (70, 3), (130, 64)], ids=str)
@pytest.mark.parametrize("sides", [(True, True), (True, False), (False, True)], ids=["both", "rows", "columns"])
def test_the_kernel_adds_gradients_to_their_factors_as_torch_does(shape, sides, dtype):
    generator = torch.Generator().manual_seed(5)
    grads = torch.randn(4, *shape, generator=generator, dtype=dtype)
    keep, gain = torch.rand(2, 4, generator=generator, dtype=torch.float64).unbind()
    axes = [axis for axis in (0, 1) if sides[axis]]
    factors = [torch.randn(4, shape[axis], shape[axis], generator=generator, dtype=dtype) for axis in (0, 1)]
    factors = [factor + factor.mT for factor in factors]
    want = [factor.clone() for factor in factors]
    scaled = grads * gain.to(dtype).view(-1, 1, 1)
    rotation.add_moments(axes, [want[axis] for axis in axes], keep.to(dtype), scaled)
    given = [factors[axis] if sides[axis] else None for axis in (0, 1)]
    assert kernel.extension.add_moments(grads, *given, keep, gain, 2)
    for found, expected in zip(factors, want, strict=True):
        rounding = torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=10 * rounding)


@needs_lapack
@pytest.mark.parametrize("weight", [0.0, 1e-20, 1e20, torch.inf, torch.nan])
def test_the_kernel_leaves_gradients_to_torch_whose_squares_float32_may_not_hold(weight):
    factors, grads = torch.eye(3).repeat(2, 1, 1), torch.ones(2, 3, 3)
    gain = torch.tensor([1.0, weight], dtype=torch.float64)
    assert not kernel.extension.add_moments(grads, factors, factors, torch.ones_like(gain), gain, 1)
    assert torch.equal(factors, torch.eye(3).repeat(2, 1, 1))


@needs_lapack
@pytest.mark.parametrize(
    ("factors", "keep"),
    [
        (torch.zeros(2, 3, 3), torch.ones(2)),
        (torch.zeros(2, 3, 3), torch.ones(3, dtype=torch.float64)),
        (torch.zeros(2, 4, 4), torch.ones(2, dtype=torch.float64)),
        (torch.zeros(3, 3, 3), torch.ones(2, dtype=torch.float64)),
        (torch.zeros(2, 3, 3, dtype=torch.float64), torch.ones(2, dtype=torch.float64)),
        (torch.zeros(2, 3, 6)[:, :, ::2], torch.ones(2, dtype=torch.float64)),
    ],
)
def test_the_kernel_adds_nothing_to_memory_that_does_not_fit(factors, keep):
    grads, gain = torch.ones(2, 3, 5), torch.ones(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"`add_moments` takes matrices of one kind, and float64"):
        kernel.extension.add_moments(grads, factors, None, keep, gain, 1)


def test_without_lapack_the_step_ends_where_it_ends_with_it(monkeypatch):
    ends = []
    for has_lapack in (kernel.has_lapack, False):
        monkeypatch.setattr(kernel, "has_lapack", has_lapack)
        params = parameters(SQUARES, torch.float64)
        feed(eigen(params, decay=0.98, weight_decay=0.1), params, gradients(SQUARES, 13, dtype=torch.float64))
        ends.append(params)
    for name in SQUARES:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_the_basis_stays_orthogonal_over_100_000_steps():
    orthogonality_after(100_000)


def test_a_skipped_gradient_changes_nothing_of_the_basis():
    params = parameters(SQUARES)
    optimizer = eigen(params, nonfinite="skip", basis_every=2)
    grads = gradients(SQUARES, 9)
    feed(optimizer, params, grads[:8])
    before = copy.deepcopy({name: optimizer.state[p] for name, p in params.items()})
    theta = {name: p.detach().clone() for name, p in params.items()}
    bad = {name: torch.full_like(g, torch.nan) for name, g in grads[8].items()}
    feed(optimizer, params, [bad])  # the basis would turn after this one
    for name, p in params.items():
        assert torch.equal(p, theta[name])
        for key, value in optimizer.state[p].items():
            if key == "seen":
                assert value == before[name][key] + 1
            elif key != "skipped":
                assert torch.equal(value, before[name][key]), key
    feed(optimizer, params, gradients(SQUARES, 9, seed=2))
    check_orthogonal(optimizer, params, 1e-5)


@pytest.mark.parametrize("when", [0, 5])
def test_a_gradient_that_is_not_finite_propagates_without_an_error(when):
    params = parameters(SQUARES)
    optimizer = eigen(params)
    grads = gradients(SQUARES, 10)
    grads[when]["a"][0, 0] = torch.inf
    feed(optimizer, params, grads)
    assert params["b"].isfinite().all()
    assert not params["a"].isfinite().any()


def test_a_complex_matrix_steps_as_pairs_with_an_axis_of_two():
    shapes = {"w": (4, 4)}
    grads = gradients(shapes, 12, dtype=torch.complex64)
    complex_ones, pairs = parameters(shapes, torch.complex64), parameters({"w": (4, 4, 2)})
    with torch.no_grad():
        pairs["w"].copy_(torch.view_as_real(complex_ones["w"]))
    feed(eigen(complex_ones), complex_ones, grads)
    feed(eigen(pairs), pairs, [{"w": torch.view_as_real(step["w"])} for step in grads])
    torch.testing.assert_close(torch.view_as_real(complex_ones["w"]), pairs["w"].detach())


def test_a_complex_vector_stays_in_its_own_coordinates():
    params = parameters({"w": (4,)}, torch.complex64)
    optimizer = eigen(params)
    feed(optimizer, params, gradients({"w": (4,)}, 3, dtype=torch.complex64))
    assert not any(name.startswith("basis_") for name in optimizer.state[params["w"]])


def test_factors_of_bfloat16_parameters_are_float32():
    params = parameters({"w": (4, 4)}, torch.bfloat16)
    optimizer = eigen(params)
    feed(optimizer, params, gradients({"w": (4, 4)}, 3, dtype=torch.bfloat16))
    kept = optimizer.state[params["w"]]
    assert {kept[name].dtype for name in ("exp_avg", "exp_avg_sq", "factor_0", "basis_1")} == {torch.float32}


def test_stochastic_rounding_keeps_changes_of_bfloat16_parameters_that_are_too_small_for_them():
    # A step of 1e-3 is below half an ulp of 1, which is 2e-3: rounded to nearest, nothing would ever move.
    grads = gradients({"w": (32, 32)}, 41, dtype=torch.bfloat16)
    moved = []
    for dtype, options in ((torch.float32, {}), (torch.bfloat16, {"stochastic_rounding": True}), (torch.bfloat16, {})):
        params = parameters({"w": (32, 32)}, dtype)
        feed(
            eigen(params, lr=1e-3, bias_correction="beta2max", **options),
            params,
            [{"w": g["w"].to(dtype)} for g in grads],
        )
        moved.append(params["w"].detach().double() - 1)
    exact, by_chance, to_nearest = moved
    slope = float((by_chance * exact).sum() / (exact * exact).sum())
    assert slope == pytest.approx(1, abs=0.25)
    assert not to_nearest.any()


def test_a_long_axis_has_no_factor():
    params = parameters({"w": (9, 4)})
    optimizer = eigen(params, basis_limit=8)
    feed(optimizer, params, gradients({"w": (9, 4)}, 3))
    assert [name for name in optimizer.state[params["w"]] if name.startswith("factor_")] == ["factor_scale", "factor_1"]


def test_one_group_may_have_a_basis_and_another_none():
    grads = gradients(SQUARES, 9)
    params, alone = parameters(SQUARES), parameters(SQUARES)
    groups = [{"params": [params["a"]], "basis": "eigen"}, {"params": [params["b"]]}]
    optimizer = KourkoutasBeta(groups, lr=1e-2, basis_every=4)
    feed(optimizer, params, [{name: step[name] for name in "ab"} for step in grads])
    feed(eigen({"a": alone["a"]}), alone, [{"a": step["a"]} for step in grads])
    feed(KourkoutasBeta([alone["b"]], lr=1e-2), alone, [{"b": step["b"]} for step in grads])
    assert torch.equal(params["a"], alone["a"])
    assert torch.equal(params["b"], alone["b"])
    assert next(route.name for route in optimizer.route()) == "eigenbasis"


def test_an_adam_checkpoint_goes_on_in_its_own_coordinates_until_the_first_turn():
    grads = gradients(SQUARES, 8)
    params = parameters(SQUARES)
    adam = torch.optim.Adam(params.values(), lr=1e-2)
    feed(adam, params, grads[:4])
    optimizer = KourkoutasBeta(params.values(), lr=1e-2, basis="eigen", basis_every=100)
    optimizer.load_state_dict(adam.state_dict())
    plain_params = {name: torch.nn.Parameter(p.detach().clone()) for name, p in params.items()}
    plain = KourkoutasBeta(plain_params.values(), lr=1e-2, beta1=0.95, bias_correction="exact")
    plain.load_state_dict(adam.state_dict())
    feed(optimizer, params, grads[4:])
    feed(plain, plain_params, grads[4:])
    for name in SQUARES:
        torch.testing.assert_close(params[name], plain_params[name])


def test_a_parameter_without_a_gradient_has_no_state():
    params = parameters(SQUARES)
    optimizer = eigen(params)
    feed(optimizer, params, [{"a": g["a"]} for g in gradients(SQUARES, 3)])
    assert params["a"] in optimizer.state
    assert params["b"] not in optimizer.state


def test_a_tensor_put_into_the_state_is_what_the_next_step_uses():
    params = parameters({"a": (5, 5), "b": (5, 5)})
    optimizer = eigen(params)
    grads = gradients({"a": (5, 5), "b": (5, 5)}, 6)
    feed(optimizer, params, grads[:5])
    optimizer.state[params["a"]]["exp_avg"] = torch.zeros(5, 5)
    feed(optimizer, params, [{name: torch.zeros_like(g) for name, g in grads[5].items()}])
    assert not optimizer.state[params["a"]]["exp_avg"].any()
    assert optimizer.state[params["b"]]["exp_avg"].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"basis": "svd"}, "`basis` must be None or \"eigen\"; got 'svd'"),
        ({"capturable": True}, "`capturable` is True but `basis`"),
        ({"state_dtype": torch.bfloat16}, "`state_dtype` is torch.bfloat16 but `basis`"),
    ],
)
def test_what_does_not_go_with_the_eigenbasis_is_refused(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        eigen(parameters(SQUARES), **options)


def test_the_basis_cannot_change_after_the_first_step():
    params = parameters(SQUARES)
    optimizer = eigen(params)
    feed(optimizer, params, gradients(SQUARES, 2))
    optimizer.param_groups[0]["basis"] = None
    with pytest.raises(RuntimeError, match=r"`basis`.*make a new optimizer"):
        feed(optimizer, params, gradients(SQUARES, 1))


def test_a_subclass_of_tensor_is_refused_by_name():
    class Tagged(torch.Tensor):
        pass

    p = torch.ones(3, 3).as_subclass(Tagged).requires_grad_()
    optimizer = KourkoutasBeta([p], basis="eigen")
    p.grad = torch.ones(3, 3)
    with pytest.raises(TypeError, match=r"Tagged.*basis=None"):
        optimizer.step()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # raised by torch's own imports
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_the_compiled_step_is_one_graph_that_turns_the_basis(backend):
    shapes = {"a": (4, 4), "b": (4, 4), "c": (4,)}
    grads = gradients(shapes, 11)
    eager, compiled = parameters(shapes), parameters(shapes)
    feed(eigen(eager, basis_every=3), eager, grads)
    torch._dynamo.reset()
    graphs = []

    def compiles(graph, inputs):
        # NOTE: inductor may refuse a first graph and let torch trace the step once more: torch makes a number of each
        # `factor_scale`, as of any scalar tensor on the CPU, and an input of that, until it finds that nobody uses it.
        # (`TensorifyScalarRestartAnalysis`.) So graphs count once they are compiled.
        made = torch._dynamo.lookup_backend(backend)(graph, inputs)
        graphs.append(graph)
        return made

    optimizer = eigen(compiled, basis_every=3)
    step = torch.compile(optimizer.step, fullgraph=True, backend=compiles)
    for g in grads:
        for name, x in g.items():
            compiled[name].grad = x.clone()
        step()
    assert len(graphs) == 1
    for name in shapes:
        torch.testing.assert_close(eager[name], compiled[name], rtol=0, atol=2e-6)


def test_each_group_has_the_defaults_of_its_own_basis():
    a, b, c = (torch.ones(3, 3, requires_grad=True) for _ in range(3))
    groups = [{"params": [a]}, {"params": [b], "basis": "eigen"}, {"params": [c], "basis": "eigen", "beta1": 0.8}]
    optimizer = KourkoutasBeta(groups)
    found = [(group["betas"][0], group["bias_correction"]) for group in optimizer.param_groups]
    assert found == [(0.9, "beta2max"), (0.95, "exact"), (0.8, "exact")]
