"""Where the Triton kernels run: on KBETA_DEVICE=cuda, or without a GPU in Triton's interpreter, on the CPU."""

import os

import pytest

from kourkoutas.torch import group, lists, routes, triton_step

DEVICE = os.environ.get("KBETA_DEVICE", "cpu")
INTERPRETED = DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def pytest_ignore_collect(collection_path, config):
    """Compiled kernels cannot be had from the interpreter, nor the other way round: `make test-gpu` runs both."""
    if collection_path.name == "test_compiled.py":
        return INTERPRETED or None
    if collection_path.name.startswith("test_") and DEVICE == "cpu" and not INTERPRETED:
        return True
    return None


class _Kept:
    def restore(self):
        """Leave it as it is."""


@pytest.fixture(autouse=INTERPRETED, scope="session")
def _interpreter_that_is_patched_once():
    """The interpreter replaces what is in `triton.language` at every call, which takes more time than the calls."""
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_once(function):
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return _Kept()

    interpreter._patch_lang = patch_once


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """The names of the kernels that were started; in the interpreter, steps on the CPU take their route."""
    seen = []
    launch = triton_step.launch

    def noted(name, programs, *args, **constants):
        seen.append(name)
        launch(name, programs, *args, **constants)

    monkeypatch.setattr(triton_step, "launch", noted)
    if INTERPRETED:
        for module in (group, lists):  # which then do as on a GPU
            monkeypatch.setattr(module, "HOST", ())
        choose = routes.choose

        def chosen(own):
            asked = own.group["foreach"] is not None or own.group["fused"] is False
            return choose(own) if asked else routes.TRITON

        monkeypatch.setattr(routes, "choose", chosen)
    return seen
