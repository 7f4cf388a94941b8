"""Routes that differ in more than options: "fused-adam" without the native kernel, "triton" in Triton's interpreter."""

import pytest

from kourkoutas.torch import general, native


@pytest.fixture
def interpreted(monkeypatch):
    """The Triton kernel for tensors of any size on the CPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    pytest.importorskip("triton")
    from kourkoutas.torch import gpu

    monkeypatch.setattr(general, "GPUS", ("cpu",))
    monkeypatch.setattr(gpu, "SMALL", 1)


@pytest.fixture(autouse=True)
def _route(request, monkeypatch):
    if "fused-adam" in request.node.name:
        monkeypatch.setattr(native, "kernel", None)
    if "triton" in request.node.name:
        request.getfixturevalue("interpreted")
