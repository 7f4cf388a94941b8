"""The one analysis: its rule, its endpoints, its shares, and what it says about missing and hard cases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.power import TTestPower

from kourkoutas.lab.judging import analysis, attribution, comparing, endpoints, headline, intervals
from kourkoutas.lab.judging.headline import digits
from kourkoutas.lab.judging.hypothesis_tests import detectable_ratio, power_of_t
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.showing import console
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from tests.lab import made_study
from tests.lab.made_study import analysed, rendered

CODE = store.Code(file="task.py", function="train", sha256="0" * 64)
Value = float | Mapping[str, Sequence[float]] | None


def folder(
    path: Path,
    values: Mapping[str, Mapping[int, Value]],
    *,
    code: store.Code = CODE,
    settings: Mapping[str, Any] | None = None,
) -> Snapshot:
    """A results folder of a user's function: a number is the endpoint, a mapping the logged metrics, None no result."""
    arms = [store.Arm(label=label, optimizer=label.partition("[")[0]) for label in values]
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})
    same: dict[str, Any] = {"testbed": "task.train", "preset": "own", "engine": "own", "settings": dict(settings or {})}
    with store.writing(path, **same, arms=arms, seeds=seeds, command="kbeta study", code=code) as study:
        for label, by_seed in values.items():
            for seed, value in by_seed.items():
                spec = RunSpec(**same, optimizer=label, seed=seed)
                study.plan([spec])
                if value is not None:
                    study.finish(spec, _result(value, study.folder(spec)))
    return Snapshot.read(path)


def _result(value: Value, run: Path) -> RunResult:
    if isinstance(value, Mapping):
        columns = {name: list(map(float, column)) for name, column in value.items()}
        steps = range(1, 1 + len(next(iter(columns.values()))))
        rows = [{"step": step, **{n: c[i] for n, c in columns.items()}} for i, step in enumerate(steps)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        last = {name: column[-1] for name, column in columns.items()}
        curve = {"step": [float(s) for s in steps], **columns}
        return RunResult(status="ok", endpoint=next(iter(last.values())), metrics=last, curve=curve)
    assert value is not None
    fine = math.isfinite(value)
    return RunResult(status="ok" if fine else "diverged", endpoint=value if fine else None)


def shifted(shift: Sequence[float], base: float = 10.0) -> tuple[dict[int, Value], dict[int, Value]]:
    """(treatment, baseline) of which the baseline is higher by `shift` in each seed."""
    return dict.fromkeys(range(len(shift)), base), {i: base + d for i, d in enumerate(shift)}


# paired t: p = 0.020 alone, 0.040 of two, 0.061 of three
SHIFT = (0.5, 0.9, 0.1, 1.2, -0.2, 0.8, 0.4, 0.2)


def test_the_primary_endpoints_holm_adjusted_test_decides(tmp_path: Path) -> None:
    p = float(scipy_stats.ttest_1samp(SHIFT, 0).pvalue)
    assert 0.05 / 3 < p < 0.05 / 2
    new, old = shifted(SHIFT)
    two = {"kbeta": new, "adam95": old, "lion": {i: 10 + (-1) ** i for i in range(8)}}
    found = analysed(folder(tmp_path / "two", two))
    (first, second) = found.primary.contrasts
    assert (first.verdict, first.family, second.verdict) == ("better", 2, "unclear")
    assert first.p == pytest.approx(p)
    assert first.p_holm == pytest.approx(2 * p)
    percent = digits(100 * np.mean(SHIFT) / (10 + np.mean(SHIFT)))
    assert found.headline.startswith(
        f"K-β is ahead of Adam 0.95 ({percent} % lower) on the deciding endpoint. No clear difference"
    )
    assert "primary endpoint" in found.rule
    three = {**two, "soap": {i: 10 + (-1) ** i * 2 for i in range(8)}}
    third = analysed(folder(tmp_path / "three", three)).primary.contrasts[0]
    assert (third.p_holm, third.verdict) == (pytest.approx(3 * p), "unclear")
    assert third.effect is not None
    assert third.effect.interval is not None
    assert third.effect.interval.holds(0.0)  # no interval without 0 beside "no clear difference"


def test_on_logarithms_the_percentage_is_of_geometric_means(tmp_path: Path) -> None:
    code = CODE.model_copy(update={"log": True})
    values: dict[str, dict[int, Value]] = {
        "kbeta": {0: 1.0, 1: 2.0, 2: 4.0},
        "adam95": {0: 2.0, 1: 5.0, 2: 7.0},
    }
    found = analysed(folder(tmp_path / "o", values, code=code)).primary.contrasts[0]
    ratio = (2 * 2.5 * 1.75) ** (1 / 3)
    assert found.effect is not None
    assert found.percent is not None
    assert found.effect.value == pytest.approx(ratio)
    assert found.percent.value == pytest.approx(100 * (1 - 1 / ratio))


@pytest.mark.parametrize(("n", "alpha", "ratio"), [(5, 0.05, 1.5), (10, 0.0125, 0.9), (40, 0.05, 0.3), (3, 0.05, 4.0)])
def test_power_equals_statsmodels(n: int, alpha: float, ratio: float) -> None:
    assert power_of_t(ratio, n, alpha) == pytest.approx(TTestPower().power(ratio, n, alpha), abs=2e-5)


@pytest.mark.parametrize(("n", "alpha", "ratio"), [(101, 0.05, 0.3), (101, 0.0125, 0.3), (1_000, 0.05, 0.1)])
def test_power_of_many_seeds_is_right_to_four_digits(n: int, alpha: float, ratio: float) -> None:
    assert power_of_t(ratio, n, alpha) == pytest.approx(TTestPower().power(ratio, n, alpha), abs=2e-4)


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (5, 0.05), (10, 0.01), (100, 0.05)])
def test_the_detectable_difference_is_found_with_the_stated_probability(n: int, alpha: float) -> None:
    ratio = detectable_ratio(n, alpha)
    assert TTestPower().power(ratio, n, alpha) == pytest.approx(0.8, abs=1e-4)


def test_unclear_says_what_the_seeds_could_have_found_and_stops_there(tmp_path: Path) -> None:
    shift = [1.0, -0.8, 0.9, -0.5, 0.6, 0.2]
    new, old = shifted(shift, base=10.0)
    found = analysed(folder(tmp_path / "o", {"kbeta": new, "adam95": old}))
    (c,) = found.primary.contrasts
    wanted = TTestPower().solve_power(nobs=6, alpha=0.05, power=0.8) * np.std(shift, ddof=1)
    assert c.detectable == pytest.approx(wanted, rel=1e-3)
    assert c.detectable_percent == pytest.approx(100 * wanted / np.mean(list(old.values())), rel=1e-3)  # type: ignore[arg-type]
    (said,) = found.answers
    assert said.endswith(
        f"These 6 seeds would have found a difference of {digits(c.detectable_percent)} % four times out of five."
    )
    assert "need" not in said


def compared(treatment: Sequence[float], baseline: Sequence[float], **how: Any) -> comparing.Contrast:
    values = {"a": dict(enumerate(treatment)), "b": dict(enumerate(baseline))}
    return comparing.compare_pairs(values, [("a", "b")], resamples=0, **how).contrasts[0]


def test_the_answer_says_what_the_data_say() -> None:
    assert headline.answer(compared([1.0, 2.0], [1.0, 2.0])) == "a and b end with the same value on all 2 seeds."
    assert "one seed is too few" in headline.answer(compared([1.0], [2.0]))
    # both signs: no percentages, so the difference itself
    sides = headline.answer(compared([0.0, 0.1, -0.1, 0.0, 0.0, 0.0], [1.0, -2.0, 2.1, 0.4, -0.2, 0.8]))
    d = np.array([1.0, -2.1, 2.2, 0.4, -0.2, 0.8])
    half = scipy_stats.t.ppf(0.975, 5) * np.std(d, ddof=1) / math.sqrt(6)
    ends = f"[{d.mean() - half:+.2g}, {d.mean() + half:+.2g}]".replace("-", "−")
    assert sides.startswith(f"No clear difference between a and b (+0.35 {ends}; ")
    assert "better on 4 of 6 seeds" in sides
    fell = headline.answer(compared([1.0, 2.0, math.nan], [2.0, 1.5, 1.0]))
    assert "1 of 3 of a diverged" in fell
    assert "3 pairs are too few for 1 comparison, 6 are needed" in fell
    gone = headline.answer(compared([math.nan] * 7, [1.0] * 7))
    assert gone.startswith("a is behind b (better on 0 of 7 seeds; 7 of 7 of a diverged; Wilcoxon, p = 0.0156")  # 2/2⁷


def test_a_failed_run_that_counts_ranks_as_the_worst_and_is_told(tmp_path: Path) -> None:
    ends = {"kbeta": {i: 1.0 + 0.01 * i for i in range(8)}, "adam95": {i: 2.0 + 0.02 * i for i in range(8)}}
    ends["kbeta"] |= dict.fromkeys((0, 1), made_study.failed())
    found = analysed(made_study.own(tmp_path / "o", ends, count_failed=True))
    (c,) = found.primary.contrasts
    assert (c.n, c.failed, c.diverged, c.test, c.losses) == (8, (2, 0), (0, 0), "Wilcoxon", 2)
    # six wins of ranks 1 to 6 against two losses that share rank 7.5: W⁻ = 15
    ranks = [1, 2, 3, 4, 5, 6, 7.5, 7.5]
    sums = [sum(r for r, sign in zip(ranks, signs, strict=True) if sign) for signs in product((0, 1), repeat=8)]
    assert c.p == pytest.approx(2 * np.mean([w <= 15 for w in sums]))
    assert "runs failed" in found.headline
    assert "2 of 8 of K-β failed" in found.answers[0]
    assert [arm.failed for arm in found.arms] == [2, 0]


def test_a_contrast_with_a_failed_run_has_no_verdict_until_it_is_repeated(tmp_path: Path) -> None:
    """K-β is worse on every seed that both finished, and crashes of Adam do not make it better."""
    ends: dict[str, Any] = {"kbeta": {i: 2.0 + 0.01 * i for i in range(10)}}
    ends["adam95"] = {i: made_study.failed("Traceback\nOSError: gone") if i < 7 else 1.0 + 0.02 * i for i in range(10)}
    ends["lion"] = {i: 3.0 + 0.05 * (i % 3) for i in range(10)}
    found = analysed(made_study.own(tmp_path / "o", ends))
    adam, lion = found.primary.contrasts
    assert (adam.verdict, adam.p, adam.p_holm, adam.effect, adam.statistics) == ("unfinished", None, None, None, {})
    assert (adam.wins, adam.ties, adam.losses, adam.failed) == (0, 0, 3, (0, 7))
    assert (lion.verdict, lion.family) == ("better", 2)  # the others are judged, in the family as it was planned
    assert "No verdict yet on K-β against Adam 0.95: runs failed." in found.headline
    (note,) = found.failures
    assert note.startswith("7 failed (Adam 0.95, seeds 0, 1, 2, 3, 4, 5, 6): OSError: gone. To repeat: kbeta study ")
    assert note.endswith("--retry-failed")
    # medians are of the runs that did not fail
    assert [arm.median for arm in found.arms][1] == pytest.approx(1.16)


def test_an_arm_of_which_every_run_failed_is_not_compared(tmp_path: Path) -> None:
    ends: dict[str, Any] = {"kbeta": {0: 1.0, 1: 1.1}, "adam95": {0: 2.0, 1: 2.3}}
    ends["lion"] = dict.fromkeys((0, 1), made_study.failed())
    found = analysed(made_study.own(tmp_path / "o", ends))
    assert [c.verdict for c in found.primary.contrasts] == ["untested", "unfinished"]
    assert "No verdict yet on K-β against Lion: runs failed." in found.headline
    counted = analysed(made_study.own(tmp_path / "counted", ends, count_failed=True))
    assert (counted.primary.contrasts[1].failed, counted.primary.contrasts[1].wins) == ((0, 2), 2)


def endpoint(name: str, a: Sequence[float], b: Sequence[float], *, primary: bool = False) -> comparing.Comparison:
    values = {"kbeta": dict(enumerate(a)), "adam999": dict(enumerate(b))}
    found = comparing.compare_pairs(values, [("kbeta", "adam999")], resamples=0)
    return replace(found, title=name, primary=primary)


def test_a_secondary_endpoint_that_leans_the_other_way_is_in_the_headline() -> None:
    rng = np.random.default_rng(0)
    first = endpoint("BCE", 10 + rng.normal(size=10), 10.5 + rng.normal(size=10), primary=True)
    base = 10 + 0.1 * rng.normal(size=10)
    worse = endpoint("mean training loss", base * 1.031, base)
    text = headline.headline([first, worse])
    assert text.startswith("No clear difference between K-β and Adam 0.999. ")
    assert text.endswith("On mean training loss (secondary) K-β is behind Adam 0.999 (3.1 % higher), on all 10 seeds.")
    # where the deciding endpoint is as clear and on the same side, it says enough
    clear = endpoint("BCE", base * 1.05 + 0.01 * rng.normal(size=10), base, primary=True)
    assert "training" not in headline.headline([clear, worse])
    # where it is on the other side, both are said
    other = endpoint("BCE", base * 0.9 + 0.01 * rng.normal(size=10), base, primary=True)
    assert "On mean training loss (secondary) K-β is behind" in headline.headline([other, worse])


def test_an_unfinished_study_has_no_verdict(tmp_path: Path) -> None:
    new, old = shifted(SHIFT)
    found = analysed(folder(tmp_path / "o", {"kbeta": new, "adam95": {**old, 7: None}}))
    assert not found.finished
    assert found.headline == "15 of 16 runs have ended. The verdict comes when all have."
    assert (found.primary.contrasts, found.answers, found.causes) == ((), (), ())
    assert found.primary.arms["kbeta"]["median"].value == 10.0


def test_a_share_needs_two_seeds_that_every_arm_finished() -> None:
    values = controls(lambda k, s: 0.01 * k * s)
    for s in range(1, 8):
        values["adam95"][s] = math.nan
    assert shares(values) == ()


# Endpoints


def test_any_logged_metric_can_be_asked_for_afterwards(tmp_path: Path) -> None:
    def course(level: float) -> dict[str, list[float]]:
        losses = [level + x for x in (9.0, 1.0, 5.0, *[3.0] * 15, 2.0, 4.0)]
        return {"loss": losses, "acc": [1 - x / 100 for x in losses]}

    values = {"kbeta": {s: course(s) for s in range(9)}, "adam95": {s: course(s + 1 + 0.1 * s) for s in range(9)}}
    study = folder(tmp_path / "o", values)
    asked = ["loss:best", "loss:tail", "acc:max", "acc:best:max", "loss:log"]
    found = analysed(study, endpoints=asked)
    assert [(j.name, j.primary, j.declared) for j in found.endpoints] == [
        ("endpoint", True, True),
        *((name, False, False) for name in asked),
    ]
    by_name = {j.name: j for j in found.endpoints}
    assert by_name["loss:best"].values["kbeta"] == {s: 1.0 + s for s in range(9)}
    assert by_name["loss:tail"].values["kbeta"] == {s: 3.0 + s for s in range(9)}  # mean of the last 2 of 20: 2 and 4
    assert by_name["acc:max"].values["kbeta"][0] == pytest.approx(0.96)
    assert by_name["acc:best:max"].values["kbeta"][0] == pytest.approx(0.99)
    assert by_name["acc:max"].contrasts[0].verdict == by_name["loss:best"].contrasts[0].verdict == "better"
    assert by_name["loss:log"].log
    assert by_name["acc:max"].standing == "secondary, asked for after the runs"
    assert found.answers == tuple(map(headline.answer, by_name["endpoint"].contrasts))


def test_a_metric_that_some_runs_never_logged_is_noted_and_one_that_none_did_is_an_error(tmp_path: Path) -> None:
    one, both = {"loss": [1.0, 0.5]}, {"loss": [1.0, 0.5], "acc": [0.1, 0.9]}
    values = {"kbeta": {0: both, 1: both, 2: one}, "adam95": {0: both, 1: both, 2: both}}
    study = folder(tmp_path / "o", values)
    found = analysed(study, endpoints=["acc:max"]).endpoints[1]
    assert "K-β has no acc for seed 2" in found.notes
    with pytest.raises(ValueError, match="unknown metric in --endpoint 'ac': did you mean 'acc'"):
        analysed(study, endpoints=["ac"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acc:maximum", "unknown word in --endpoint acc:maximum 'maximum': did you mean 'max'"),
        ("acc:min:max", "give one of min, max"),
        (":max", "--endpoint must look like METRIC"),
        ("loss:until", "unknown word in --endpoint loss:until 'until': did you mean .*'until=VALUE'"),
        ("loss:until=", "--endpoint loss:until=: until= needs a finite number, for example val_loss:until=0.5; got ''"),
        ("loss:until=low", "until= needs a finite number"),
        ("loss:seconds_until=nan", "until= needs a finite number"),
        ("loss:best=3", "unknown word in --endpoint loss:best=3 'best=3'"),
        ("loss:best:until=3", "give one of last, best, tail, until, seconds_until"),
        ("loss:until=3:until=4", "give one of last, best, tail, until, seconds_until"),
    ],
)
def test_an_endpoint_that_cannot_be_understood_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        endpoints.parse(text)


# Attribution


def controls(noise: Callable[[int, int], float]) -> dict[str, dict[int, float]]:
    """adam95 → adam95-warm takes away 4.95 of 5, kbeta-static → kbeta the rest."""
    levels = {"kbeta": 5.0, "adam95": 10.0, "adam95-warm": 5.05, "kbeta-static": 5.05}
    return {arm: {s: level + noise(k, s) for s in range(8)} for k, (arm, level) in enumerate(levels.items())}


def shares(values: dict[str, dict[int, float]]) -> tuple[attribution.Attribution, ...]:
    return attribution.attribute(comparing.compare_pairs(values, [("kbeta", "adam95")], resamples=0))


def test_attribution_names_shares_largest_first_that_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(5)
    noise = rng.normal(0, 0.02, (4, 8))
    values = controls(lambda k, s: float(noise[k, s]))
    (found,) = shares(values)
    assert found.parts[0].cause == "hidden warmup"
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    by_cause = {part.cause: part for part in found.parts}
    whole = np.mean([values["adam95"][s] - values["kbeta"][s] for s in range(8)])
    warmup = np.mean([values["adam95"][s] - values["adam95-warm"][s] for s in range(8)])
    assert by_cause["hidden warmup"].share == pytest.approx(warmup / whole)
    assert by_cause["dynamics of β2"].ci.holds(0.01)
    assert by_cause["hidden warmup"].ci.holds(0.99)
    assert "hidden warmup 99 % [" in found.sentence
    assert found.paths == (("adam95", "adam95-warm", "kbeta-static", "kbeta"),)


def test_the_interval_of_a_share_holds_exactly_the_shares_that_a_t_test_does_not_reject() -> None:
    rng = np.random.default_rng(2)
    whole = rng.normal(3, 1, 10)
    part = 0.4 * whole + rng.normal(0, 0.5, 10)
    ci = intervals.fieller(part, whole)
    assert ci is not None
    for share in (ci.low, ci.high):
        assert scipy_stats.ttest_1samp(part - share * whole, 0).pvalue == pytest.approx(0.05, abs=1e-9)
    assert scipy_stats.ttest_1samp(part - (ci.low + ci.high) / 2 * whole, 0).pvalue > 0.05


def test_a_difference_that_is_not_shown_is_not_taken_apart() -> None:
    rng = np.random.default_rng(0)
    values = {arm: {s: rng.normal(5, 1) for s in range(6)} for arm in ("kbeta", "adam95", "kbeta-static")}
    (found,) = shares(values)
    assert found.parts == ()
    assert "nothing to explain" in found.sentence


def test_an_absent_control_leaves_its_step_with_the_next() -> None:
    noise = np.random.default_rng(1).normal(0, 0.02, (4, 8))
    values = controls(lambda k, s: float(noise[k, s]))
    del values["kbeta-static"]
    (found,) = shares(values)
    assert {part.cause for part in found.parts} == {"hidden warmup", "dynamics of β2 and mean of β2"}
    assert shares({arm: values[arm] for arm in ("kbeta", "adam95")}) == ()


# What is missing, and what is large


def test_an_analysis_is_strict_json_with_its_sentences_and_arms(tmp_path: Path) -> None:
    new, old = shifted(SHIFT)
    study = folder(tmp_path / "o", {"kbeta": new, "adam95": {**old, 7: math.nan}})
    whole = json.loads(json.dumps(analysis.as_json(analysed(study)), allow_nan=False))
    found = whole["analysis"]
    assert len(whole["runs"]) == 16
    assert [(arm["label"], arm["role"], arm["runs"], arm["ok"], arm["diverged"]) for arm in found["arms"]] == [
        ("kbeta", "treatment", 8, 8, 0),
        ("adam95", "baseline", 8, 7, 1),
    ]
    (contrast,) = found["endpoints"][0]["contrasts"]
    assert contrast["test"] == "Wilcoxon"  # a run diverged
    assert {"effect", "percent", "p", "p_holm", "detectable", "statistics", "verdict", "notes"} <= contrast.keys()
    assert len(found["answers"]) == 1


def test_values_beyond_1e100_have_diverged_and_a_damaged_trace_costs_no_page(tmp_path: Path) -> None:
    values = {"kbeta": {0: 1.2, 1: 1.25, 2: 1.21}, "adam95": {0: 1.6e308, 1: 1.7, 2: 1.65}}
    study = folder(tmp_path / "o", values)  # type: ignore[arg-type]
    (Snapshot.read(study.path).runs[0].folder / "trace.npz").write_bytes(b"PK damaged")
    assert analysed(study).primary.contrasts[0].diverged == (0, 1)
    assert "1 of 3 of Adam 0.95 diverged" in rendered(study)


def test_a_hundred_thousand_seeds_are_compared_without_a_bootstrap() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(1.0, 1, 100_000)
    values = {"a": dict(enumerate(x.tolist())), "b": dict(enumerate((x + rng.normal(0.1, 1, 100_000)).tolist()))}
    found = comparing.compare(values, baseline="b")
    assert found.contrasts[0].n == 100_000
    assert found.contrasts[0].verdict == "better"
    assert "bootstrap" not in found.contrasts[0].statistics


def test_very_many_arms_have_no_bootstrap_and_say_so_and_only_the_first_are_printed() -> None:
    values = {f"a{i}": {0: 1.0 + i, 1: 2.0, 2: 3.5 - i} for i in range(300)}
    found = comparing.compare(values, baseline="a0")
    assert len(found.contrasts) == 299
    assert any("no bootstrap intervals" in note for note in found.notes)
    from rich.console import Console

    terminal = Console(width=100)
    with terminal.capture() as printed:
        terminal.print(console.comparison(found))
    assert "the first 200 of 299 contrasts are shown; --json has all" in printed.get()
