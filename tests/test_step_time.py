"""The benchmark's bookkeeping; what it measures is nobody's test."""

import json
import math

import pytest

pytest.importorskip("step_time", reason="benchmarks/ is not here")

import step_time as bench
from contestants import SHAPES, count
from timing import Contestant, alternate, compare


def fake(seconds, seen, name, baseline="base"):
    def steps(k):
        seen.append(name)
        return k * seconds

    return Contestant(steps, baseline, 800)


def test_ratios_are_to_the_baseline_of_the_same_run():
    seen = []
    contestants = {"base": fake(0.02, seen, "base"), "other": fake(0.03, seen, "other")}
    rows = {row["contestant"]: row for row in compare(contestants, parameters=100, rounds=4, seconds=10)}
    assert rows["base"]["ratio"] == 1
    assert rows["other"]["ratio"] == pytest.approx(1.5)
    assert rows["other"]["seconds"] == pytest.approx(0.03)
    assert rows["other"]["state_bytes_per_parameter"] == 8


def test_the_order_is_reversed_from_round_to_round():
    seen = []
    contestants = {name: fake(0.02, seen, name) for name in "abc"}
    times = alternate(contestants, rounds=3, seconds=10)
    assert seen[-9:] == list("abccbaabc")
    assert [len(x) for x in times.values()] == [3, 3, 3]


def test_the_budget_ends_the_rounds_but_not_before_three():
    seen = []
    assert len(alternate({"a": fake(0.5, seen, "a")}, rounds=50, seconds=0.1)["a"]) == 3
    assert len(alternate({"a": fake(0.5, seen, "a")}, rounds=50, seconds=2.1)["a"]) == 5


def test_shapes_have_the_sizes_that_the_documentation_states():
    assert {name: len(shapes) for name, shapes in SHAPES.items()} == {"tiny": 1, "pinn": 32, "charlm": 78, "big": 6}
    assert [round(count(name), -3) for name in ("pinn", "charlm", "big")] == [232_000, 19_440_000, 100_663_000]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--framework", "caffe"), ("--shape", "huge"), ("--rounds", "0"), ("--threads", "0"), ("--seconds", "nan")],
)
def test_a_value_that_cannot_be_is_refused(option, value, capsys):
    with pytest.raises(SystemExit):
        bench.main([option, value])
    message = capsys.readouterr().err
    assert option in message
    assert value in message


@pytest.mark.slow
def test_the_command_times_a_framework_and_prints_json(capsys, tmp_path):
    pytest.importorskip("torch")
    options = [
        "--framework",
        "torch",
        "--shape",
        "tiny",
        "--rounds",
        "3",
        "--threads",
        "1",
        "--device",
        "cpu",
        "--json",
    ]
    assert bench.main([*options, "--out", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    names = {row["contestant"] for row in result["rows"]}
    assert {"Adam fused", "Adam foreach", "AMSGrad fused", "K-β, no kernel"} <= names
    assert json.loads((tmp_path / "bench.json").read_text()) == result


def test_a_benchmark_on_a_gpu_says_that_there_is_none(monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        bench.main(["--device", "cuda"])
    assert "--device is 'cuda', but torch finds no GPU" in capsys.readouterr().err
    with pytest.raises(ValueError, match="`device` 'cuda' is for torch only; got \\['jax'\\]"):
        bench.run(["jax"], ["tiny"], device="cuda")


def test_a_benchmark_says_what_it_skipped_and_why(monkeypatch):
    monkeypatch.setattr(bench, "installed", lambda: ["mlx"])
    result = bench.run(shapes=["tiny"])
    assert [one["what"] for one in result["skipped"]] == ["torch", "jax", "mlx tiny"]
    text = bench.table(result)
    assert "skipped torch: not installed: pip install 'kourkoutas-beta[torch]'" in text
    assert "skipped mlx tiny: " in text
    with pytest.raises(ValueError, match=r"`framework` 'jax' is not installed: pip install 'kourkoutas-beta\[jax\]'"):
        bench.run(["jax"], ["tiny"])


@pytest.mark.slow
def test_a_benchmark_without_the_kernel_says_so(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("KBETA_NATIVE", "0")
    result = bench.run(["torch"], ["tiny"], threads=1, rounds=3, seconds=0.1)
    assert [one["what"] for one in result["skipped"]] == ["torch, K-β through its C kernel"]


@pytest.mark.parametrize(("option", "value"), [("rounds", 0), ("threads", -1), ("threads", 0), ("seconds", math.nan)])
def test_a_benchmark_of_nothing_is_refused(option, value):
    with pytest.raises(ValueError, match=f"`{option}` must be .*; got {value}"):
        bench.run(["torch"], ["tiny"], **{option: value})
