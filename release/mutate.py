"""Mutation testing: change one operator or number of a module at a time, and see whether its tests notice.

    python release/mutate.py [NAME ...] [--seconds 600] [--lines 12 40]

NAME is one of `TARGETS`; all of them by default. Prints each mutant that no test noticed, and the score. A mutant
runs in a forked process that already has NumPy, SciPy, pytest and hypothesis, so that hundreds take minutes; the tests
named here must therefore not import a framework.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
SECONDS_PER_MUTANT = 120


class Target(NamedTuple):
    module: str
    tests: tuple[str, ...]


JUDGING = "tests/lab/judging"
TARGETS = {
    "rule": Target("kourkoutas.rule", ("tests/test_rule.py", "tests/test_warmup.py", "tests/properties/test_rule.py")),
    "buckets": Target("kourkoutas.buckets", ("tests/test_buckets.py",)),
    **{
        name: Target(
            f"kourkoutas.lab.judging.{name}", (f"{JUDGING}/test_comparing.py", f"{JUDGING}/test_hypothesis_tests.py")
        )
        for name in ("hypothesis_tests", "intervals", "comparing", "statistics", "values")
    },
    "deciding": Target("kourkoutas.lab.judging.deciding", (f"{JUDGING}/test_deciding.py",)),
    "luck": Target("kourkoutas.lab.tuning.luck", (f"{JUDGING}/test_deciding.py",)),
    "verdicts": Target(
        "kourkoutas.lab.judging.verdicts", (f"{JUDGING}/test_verdicts.py", f"{JUDGING}/test_comparing.py")
    ),
}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Pow: ast.Mult}
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


def changes(node: ast.AST) -> list[ast.AST]:
    """What a node may become: another operator, a number one larger, the other truth value, the other `and` or `or`."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        new = copy.deepcopy(node)
        new.op = ARITHMETIC[type(node.op)]()
        return [new]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        new = copy.deepcopy(node)
        new.ops[0] = COMPARISONS[type(node.ops[0])]()
        return [new]
    if isinstance(node, ast.BoolOp):
        new = copy.deepcopy(node)
        new.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return [new]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        return [node.operand]
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            return [ast.Constant(not node.value)]
        if isinstance(node.value, int | float):
            return [ast.Constant(node.value + 1)]
    return []


def is_left_alone(field: str) -> bool:
    """Whether a part of the code has no number in it: annotations, which are not run, and `frozen` of dataclasses."""
    return field in ("annotation", "returns", "decorator_list")


class Mutant(NamedTuple):
    line: int
    was: str
    is_now: str
    source: str


def mutants(source: str) -> list[Mutant]:
    tree, found = ast.parse(source), []

    def visit(node: ast.AST) -> None:
        for field, value in ast.iter_fields(node):
            if is_left_alone(field):
                continue
            for i, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(child, ast.AST):
                    continue
                for new in changes(child):
                    was = ast.unparse(child)
                    place(node, field, i, new)
                    found.append(Mutant(getattr(child, "lineno", 0), was, ast.unparse(new), ast.unparse(tree)))
                    place(node, field, i, child)
                visit(child)

    def place(node: ast.AST, field: str, i: int | None, child: ast.AST) -> None:
        if i is None:
            setattr(node, field, child)
        else:
            getattr(node, field)[i] = child

    visit(tree)
    return found


def survives(target: Target, mutant: Mutant) -> bool:
    """Whether all tests pass with the mutant in the module's place."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = tested(target, mutant)
        finally:
            os._exit(code)
    deadline = time.monotonic() + SECONDS_PER_MUTANT
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)  # it runs for ever, which is seen
    os.waitpid(child, 0)
    return False


def tested(target: Target, mutant: Mutant) -> int:
    import pytest

    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)

    class Finder:
        """Loads the mutant under the module's name, so that everything that imports it gets it."""

        def find_spec(self, name, path=None, target_module=None):
            return importlib.util.spec_from_loader(name, self) if name == target.module else None

        def create_module(self, spec):
            return None

        def exec_module(self, module):
            exec(compile(mutant.source, f"<{target.module}>", "exec"), module.__dict__)

    sys.meta_path.insert(0, Finder())
    for name in [name for name in sys.modules if name.startswith(("kourkoutas", "tests"))]:
        del sys.modules[name]
    os.chdir(ROOT)
    options = [
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-m",
        "not slow",
        "--assert=plain",
        "--hypothesis-seed=1",
    ]
    return int(pytest.main([*options, *target.tests]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], help=", ".join(TARGETS))
    parser.add_argument("--seconds", type=float, default=1200.0, help="stop after so long")
    parser.add_argument("--lines", type=int, nargs="+", help="of these lines only, to try those again that survived")
    given = parser.parse_args()
    import hypothesis  # noqa: F401 - before the first fork
    import numpy  # noqa: F401
    import pandas  # noqa: F401
    import pytest  # noqa: F401
    import rich.console  # noqa: F401
    import scipy.stats  # noqa: F401
    import statsmodels.stats.multitest  # noqa: F401

    deadline = time.monotonic() + given.seconds
    for name in given.names or TARGETS:
        target = TARGETS[name]
        path = ROOT / "src" / Path(*target.module.split(".")).with_suffix(".py")
        source = path.read_text(encoding="utf-8")
        if not survives(target, Mutant(0, "", "", source)):
            raise SystemExit(f"{name}: the tests fail without any change")
        all_mutants, alive, tried = mutants(source), [], 0
        if given.lines:
            all_mutants = [mutant for mutant in all_mutants if mutant.line in given.lines]
        for mutant in all_mutants:
            if time.monotonic() > deadline:
                break
            tried += 1
            if survives(target, mutant):
                alive.append(mutant)
                print(f"{path.name}:{mutant.line}: {mutant.was}  ->  {mutant.is_now}", flush=True)
        print(f"{name}: {tried - len(alive)} of {tried} mutants seen ({len(all_mutants)} in all)", flush=True)


if __name__ == "__main__":
    main()
