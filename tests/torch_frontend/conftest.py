"""The route of a test, set up as `tests.torch_frontend.routes` names it."""

import pytest

from kourkoutas.torch import lists, native
from tests.torch_frontend.routes import ROUTES


@pytest.fixture
def interpreted(monkeypatch):
    """The Triton kernel for tensors of any size on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from kourkoutas.torch import gpu

    monkeypatch.setattr(lists, "GPUS", ("cpu",))
    monkeypatch.setattr(gpu, "SMALL", 1)


@pytest.fixture
def no_kernel(monkeypatch):
    monkeypatch.setattr(native, "kernel", None)


@pytest.fixture
def route(request):
    """The options that ask for the route named by the parameter."""
    if request.param == "kernel" and native.kernel is None:
        pytest.skip("the native kernel was not built")
    if request.param == "host":
        request.getfixturevalue("no_kernel")
    if request.param == "triton":
        request.getfixturevalue("interpreted")
    return ROUTES[request.param]
