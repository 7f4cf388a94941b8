"""A default step passes through the files that its package's docstring lists, and no others."""

import importlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import kourkoutas

HOME = Path(kourkoutas.__file__).parent


def files_of(call):
    """The files of the package whose functions `call` runs."""
    found = set()

    def note(frame, event, _):
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {Path(file).name for file in found if Path(file).is_relative_to(HOME)}


def optax_step():
    from kourkoutas.optax import kourkoutas_beta

    params = {"a": {"w": np.ones((3, 2), np.float32)}, "b": np.ones(2, np.float32)}
    solver = kourkoutas_beta(1e-3)
    state = solver.init(params)
    return lambda: solver.update(params, state, params)


def mlx_step():
    import mlx.core as mx

    from kourkoutas.mlx import KourkoutasBeta

    params = {"a": {"w": mx.ones((3, 2))}, "b": mx.ones(2)}
    optimizer = KourkoutasBeta(1e-3)
    optimizer.init(params)
    return lambda: optimizer.apply_gradients(params, params)


@pytest.mark.parametrize(("package", "needs", "step"), [("optax", "optax", optax_step), ("mlx", "mlx.core", mlx_step)])
def test_the_docstring_lists_the_files_of_a_default_step(package, needs, step):
    pytest.importorskip(needs)
    text = importlib.import_module(f"kourkoutas.{package}").__doc__
    (way,) = re.findall(r"The way of a step.*?\n\n", text, re.DOTALL)
    passed = files_of(step())
    assert passed == set(re.findall(r"`(\w+\.py)`", way))
    assert len(passed) <= 4


def torch_step(**options):
    import torch

    from kourkoutas.torch import KourkoutasBeta

    params = [torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(2))]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer = KourkoutasBeta(params, **options)
    optimizer.step()
    return optimizer


ROUTES = [("C kernel", {}, 4), ("own operations", {"foreach": True}, 5), ("in the eigenbasis", {"basis": "eigen"}, 9)]


@pytest.mark.parametrize(("route", "options", "most"), ROUTES)
def test_the_docstring_lists_the_files_of_a_default_step_of_each_torch_route(route, options, most):
    pytest.importorskip("torch")
    from kourkoutas.torch import kernel

    optimizer = torch_step(**options)
    if optimizer.route()[0].name != "kernel" and "foreach" not in options and kernel.extension is None:
        pytest.skip("the C kernel was not built")
    text = importlib.import_module("kourkoutas.torch").__doc__
    (way,) = [x for x in re.findall(r"The way of a step.*?\n\n", text, re.DOTALL) if route in x]
    passed = files_of(optimizer.step)
    assert passed == set(re.findall(r"`(\w+\.py)`", way))
    assert len(passed) <= most  # step.c comes on top for the kernel
