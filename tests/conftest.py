"""Test workers share the cores: each framework gets one thread, and no test fails because another one was busy."""

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared cores")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Importing every framework makes a million objects that live as long as the process.

    Searching them for garbage takes half a second each time, and collecting the tests would do so a dozen times.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
