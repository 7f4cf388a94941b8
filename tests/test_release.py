"""The bounds of pyproject.toml, the pins of constraints.txt and the scripts of release/ agree with each other."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def load(name, folder=ROOT / "release"):
    spec = importlib.util.spec_from_file_location(f"release_{name}", folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def parts(version):
    return [int(x) for x in re.findall(r"\d+", version)]


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_what_is_tested_every_day_is_not_older_than_the_floor(framework):
    found = dict(floor.split("==") for floor in load("floors").floors(framework))
    assert found, "an extra without a lower bound"
    for package, lowest in found.items():
        assert parts(pins()[package.partition("[")[0]]) >= parts(lowest), package


@pytest.mark.parametrize("framework", ["torch", "jax", "mlx"])
def test_every_package_with_a_floor_is_also_tried_in_its_pinned_version(framework):
    script = load("floors")
    *packages, option, file = script.pinned(framework)
    assert packages == [floor.split("==")[0] for floor in script.floors(framework)]
    assert {package.partition("[")[0] for package in packages} <= set(pins())
    assert (option, Path(file)) == ("-c", ROOT / "constraints.txt")


def test_the_packages_are_tried_with_every_framework_that_has_a_floor():
    assert set(load("try_dist").STEPS) == set(load("floors").TESTS)


def test_pins_are_sorted_so_that_one_is_found():
    names = [name.lower().replace("_", "-") for name in pins()]
    assert names == sorted(names)


def test_the_description_for_the_index_has_no_relative_link():
    pytest.importorskip("setuptools")
    setup = load("setup", ROOT)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    described = setup.for_the_index(readme)
    pattern = r'\]\(([^)]+)\)|\b(?:src|srcset)="([^"]+)"'
    before = [link or picture for link, picture in re.findall(pattern, readme)]
    after = [link or picture for link, picture in re.findall(pattern, described)]
    assert len(after) == len(before)
    for old, new in zip(before, after, strict=True):
        if old.startswith(("https://", "#")):  # "#" is a place in the page itself
            assert new == old
        else:
            home = setup.RAW if old.endswith((".png", ".gif")) else setup.HOME
            assert new == home + old
            assert (ROOT / old.partition("#")[0]).exists(), old
    assert sum(new.startswith((setup.RAW, setup.HOME)) for new in after) > 5
