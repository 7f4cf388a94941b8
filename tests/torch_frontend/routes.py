"""The ways through the PyTorch front end, by name; the fixture `route` of conftest.py takes one of them."""

import pytest

# name → the options that ask for it. "kernel" and "fused" differ in whether the C kernel is there: without it, torch's
# fused Adam kernel does the elementwise part of the foreach route.
ROUTES = {
    "kernel": {"fused": True},
    "fused": {"fused": True},
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True, "fused": False},
    "capturable-foreach": {"capturable": True, "foreach": True},
}
SLOW = ("capturable-foreach",)  # its scalars are those of "capturable", its update that of "foreach"


def on(*names):
    """Run a test on these routes, which it receives as the options that ask for them."""
    marked = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in names]
    return pytest.mark.parametrize("route", marked, indirect=True)


on_every_route = on(*ROUTES)
