"""A torch that has lost one of the private names in kourkoutas/torch/private.py still imports and steps."""

import subprocess
import sys
from pathlib import Path

import pytest

import kourkoutas.torch

MODES = "foreach: this torch does not say whether a mode watches the step; a new torch may have renamed it"
# name → the route of a step without it, where it is another
LOST = {
    "torch._C._len_torch_dispatch_stack": MODES,
    "torch._C._len_torch_function_stack": MODES,
    "torch._C._functorch.peek_interpreter_stack": MODES,
    "torch._C._get_function_stack_at": None,
    "torch.utils._device.DeviceContext": None,
    "torch._fused_adamw_": None,
    "torch.Tensor.__dlpack_c_exchange_api__": "foreach: the C kernel is not there: it needs torch 2.10 or later",
}
# torch._dynamo, which the first optimizer of a process imports, takes as long to import as torch itself.
STEP = """
import torch, torch._dynamo, torch.utils._device

def step(KourkoutasBeta, **options):
    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = KourkoutasBeta([p], lr=0.1, beta2_min=0.999, **options)  # Adam, whose first step is lr
    optimizer.step()
    assert torch.allclose(p, torch.full((3,), 0.9)), p
    return optimizer.route()[0]
"""


# One process imports torch, and a child of it loses one name: importing torch takes longer than everything else.
EACH = """
import os, sys, traceback

for name in {names!r}:
    sys.stdout.flush()
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    try:
        exec("kept = " + name + "; del " + name)
        from kourkoutas.torch import KourkoutasBeta, kernel
        exec(name + " = kept")  # torch of today needs it itself
        route = step(KourkoutasBeta)
        step(KourkoutasBeta, foreach=True)
        step(KourkoutasBeta, fused=False)
        kernel.extension = None
        step(KourkoutasBeta)
        with torch.device("cpu"):
            step(KourkoutasBeta)
        print(name, f"{{route.name}}: {{route.reason}}", sep="\\t", flush=True)
    except BaseException:
        print(name, repr(traceback.format_exc()), sep="\\t", flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def told():
    """{name: the route of a step without it, or what went wrong}."""
    script = STEP + EACH.format(names=list(LOST))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(line.split("\t") for line in done.stdout.splitlines())


@pytest.mark.parametrize("name", LOST)
def test_a_torch_without_the_name_imports_and_steps_on_every_route(told, name):
    usual = kourkoutas.torch.kernel.extension is not None
    assert "Traceback" not in told[name]
    if usual:
        assert told[name] == (LOST[name] or "kernel: the C kernel takes every tensor")


def test_private_names_stand_in_one_file_only():
    """Apart from `torch._foreach_*`, names of torch that begin with an underscore are in private.py."""
    here = Path(kourkoutas.torch.__file__).parent
    wrong = []
    for file in here.glob("*.py"):
        if file.name == "private.py":
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            private = "torch._" in line.replace("torch._foreach_", "")
            nested = "from torch" in line and "._" in line
            if private or nested:
                wrong.append(f"{file.name}:{number}: {line.strip()}")
    assert wrong == []
