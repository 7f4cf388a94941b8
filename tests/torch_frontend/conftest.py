"""The route of a test, set up as `tests.torch_frontend.routes` names it."""

import pytest

from kourkoutas.torch import kernel
from tests.torch_frontend.routes import ROUTES


@pytest.fixture
def no_kernel(monkeypatch):
    monkeypatch.setattr(kernel, "extension", None)


@pytest.fixture
def route(request):
    """The options that ask for the route named by the parameter."""
    if request.param == "kernel" and kernel.extension is None:
        pytest.skip("the C kernel was not built")
    if request.param == "fused":
        request.getfixturevalue("no_kernel")
    return ROUTES[request.param]
