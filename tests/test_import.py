import subprocess
import sys


def loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_importing_the_package_imports_no_framework():
    assert not loaded_after("import kourkoutas, kourkoutas.oracle, kourkoutas.trace, kourkoutas.state") & {
        "torch",
        "jax",
        "optax",
        "mlx",
        "scipy",
    }


def test_a_missing_framework_gives_one_line_that_names_the_extra():
    code = "import sys; sys.modules['torch'] = None\nimport kourkoutas.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ImportError: kourkoutas.torch needs PyTorch: pip install 'kourkoutas-beta[torch]'"
    )
