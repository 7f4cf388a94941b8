"""The examples for tools, at small size: each learns, and is short enough to be read at once."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# name → (package it needs, size of the run, a loss that it must come below; an untrained one is above)
SIZES = {
    "hf_trainer": ("transformers", 60, 1.5),  # ln 16 = 2.8 before training
    "accelerate_loop": ("accelerate", 30, 0.3),  # the variance of sin(2x) is 0.5
    "lightning_module": ("lightning", 30, 0.3),
    "timm_registry": ("timm", 20, 0.3),  # ln 2 = 0.7
    "peft_lora": ("peft", 60, 2.2),
    "flax_linen": ("flax", 300, 0.3),
    "jax_flax": ("flax", 400, 0.3),
    "equinox_train": ("equinox", 300, 0.3),
    "keras_fit": ("keras", 40, 0.3),
}

ELSEWHERE = {  # run by other tests
    "torch_train",
    "mlx_train",
    "deepxde_burgers",
    "deepxde_jax",
    "pina_switch",
    "neuralop_fno",
    "physicsnemo_fno",
    "jinns_solve",
    "torchphysics_poisson",
    "suite_pina",
    "suite_apebench",
    "pytorch_optimizer_registry",
}


def test_every_example_for_a_tool_is_at_most_sixty_lines():
    names = {*SIZES, *ELSEWHERE}
    lengths = {name: len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) for name in names}
    assert {name: n for name, n in lengths.items() if n > 60} == {}


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", [name for name in SIZES if name != "keras_fit"])
def test_an_example_learns(name):
    package, size, below = SIZES[name]
    pytest.importorskip(package)
    assert load(name).main(size) < below


@pytest.mark.parametrize("backend", ["torch", "jax"])
def test_the_keras_example_learns_on_either_backend(backend):
    package, size, below = SIZES["keras_fit"]
    if importlib.util.find_spec(package) is None:
        pytest.skip("needs keras")
    source = f"import runpy; print(runpy.run_path({str(EXAMPLES / 'keras_fit.py')!r})['main']({size}))"
    env = {**os.environ, "KERAS_BACKEND": backend}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.splitlines()[-1]) < below


def printed(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_torch_example_runs_and_says_what_it_reached():
    assert "loss" in printed("torch_train.py")


def test_the_flax_example_trains_and_shows_its_beta2():
    *_, last = re.findall(r"step +\d+  loss (\S+)  β2: hidden 0\.9", printed("jax_flax.py"))
    assert float(last) < 0.1


def test_the_fsdp2_example_runs_on_two_processes_and_learns():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, EXAMPLES / "fsdp2_train.py"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"2 ranks: loss ([0-9.]+) -> ([0-9.]+)", done.stdout)
    assert found, done.stdout
    assert float(found[2]) < 0.7 * float(found[1])
