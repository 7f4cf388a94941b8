"""The runnable Python listings of the paper's appendices, taken from its LaTeX source and run by `kbeta script`.

The source is looked for at `../shared/paper/kourkoutas-beta.tex` beside the repository, or where KBETA_PAPER says.
"""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("mlx.core")

from kourkoutas import paper

ROOT = Path(__file__).parents[2]
PAPER = Path(os.environ.get("KBETA_PAPER", ROOT.parent / "shared" / "paper" / "kourkoutas-beta.tex"))
SANITY = ("quadratic_bowl.py", "logistic_regression.py", "concave_utility_ascent.py")
ABLATIONS = ("ablation_Kourkoutas_asAdam.py", "ablation_Kourkoutas_asAdam_BC.py")
TRIGGER = "rare_trigger_toy.py"
NO_GPU = "mx.set_default_device(mx.gpu)\n"

pytestmark = pytest.mark.skipif(not PAPER.exists(), reason=f"the paper's LaTeX source is not at {PAPER}")


def listing(name: str) -> str:
    """The text of a captioned listing; the one line that asks for a GPU is left out."""
    pattern = r"\\begin\{lstlisting\}\[language=Python,\s*caption=\{\\texttt\{([^}]*)\}\}\]\n(.*?)\\end\{lstlisting\}"
    found = dict(re.findall(pattern, PAPER.read_text(encoding="utf-8"), re.DOTALL))
    found = {caption.replace("\\_", "_").strip(): body for caption, body in found.items()}
    assert set(found) == {*SANITY, *ABLATIONS, TRIGGER}
    return found[name].replace(NO_GPU, "")


def run(name: str, tmp_path: Path) -> str:
    script = tmp_path / name
    script.write_text(listing(name), encoding="utf-8")
    call = [sys.executable, "-P", "-m", "kourkoutas", "script", script.name]
    done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The listing as a module, without its main part."""
    module = types.ModuleType(name.removesuffix(".py"))
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "kbeta.optim", paper)
    monkeypatch.setitem(sys.modules, "kbeta", types.ModuleType("kbeta"))
    exec(compile(listing(name), name, "exec"), module.__dict__)
    return module


def figures(text: str, key: str) -> list[float]:
    return [float(x) for x in re.findall(rf"{key} median: (\S+)", text)]


@pytest.mark.parametrize("name", ABLATIONS)
def test_an_ablation_finds_a_fixed_beta2_equal_to_adam_at_every_step(name, tmp_path):
    assert run(name, tmp_path) == "Per-step equivalence: OK\n"


@pytest.mark.parametrize("name", SANITY)
def test_a_sanity_check_gives_adam_for_a_fixed_beta2_after_a_few_steps(name, capsys, monkeypatch):
    load(name, monkeypatch).median_benchmark(runs=1, steps=30)
    dynamic, fixed, adam = figures(capsys.readouterr().out, "loss")
    assert fixed == pytest.approx(adam, rel=1e-4)
    assert dynamic != pytest.approx(adam, rel=1e-4)


def test_the_rare_trigger_listing_learns_the_base_rate_in_a_few_steps(monkeypatch):
    module = load(TRIGGER, monkeypatch)
    _, losses, _ = module.train_once(module.Cfg(steps=60), module.make_kbeta_release, label="short")
    # From log 2 for an undecided classifier towards the entropy of a 1 % event.
    assert losses[0] > 0.3
    assert losses[-1] < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", SANITY)
def test_a_sanity_check_runs_unmodified_to_the_papers_table(name, tmp_path):
    dynamic, fixed, adam = figures(run(name, tmp_path), "loss")
    # The paper's tables: 4.70e-5, 4.69e-5, 4.69e-5; 3.5e-9, 9.3e-7, 9.3e-7; all near 5.8e-9.
    if name == "quadratic_bowl.py":
        assert fixed == pytest.approx(4.69e-5, rel=1e-2)
        assert adam == pytest.approx(4.69e-5, rel=1e-2)
        assert dynamic == pytest.approx(4.70e-5, rel=1e-2)
    elif name == "logistic_regression.py":
        assert fixed == pytest.approx(adam, rel=1e-2)
        assert dynamic < fixed / 100
    else:
        assert max(dynamic, fixed, adam) < 1e-7


@pytest.mark.slow
def test_the_rare_trigger_listing_runs_unmodified_to_the_papers_loss(tmp_path):
    final = re.search(r"Final loss: (\S+)", run(TRIGGER, tmp_path))
    assert final is not None
    assert float(final.group(1)) == pytest.approx(0.001055, abs=5e-6)
