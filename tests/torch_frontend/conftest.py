"""Turns the native kernel off for the route "fused-adam", whose options are those of "fused"."""

import pytest

from kbeta.torch import native


@pytest.fixture(autouse=True)
def _torch_kernels_only(request, monkeypatch):
    if "fused-adam" in request.node.name:
        monkeypatch.setattr(native, "kernel", None)
