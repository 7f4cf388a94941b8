"""Plans: seeds, options and grids from words, the runs they come down to, what is compared, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.planning.contrasts import contrasts

ARMS = ["kbeta", "adam95"]
TASK = """
def train(trial):
    return 1.0 + trial.seed
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


def plan(file: Path, seeds: str = "0-3", optimizers: list[str] = ARMS, **options: str) -> planning.Plan:
    return planning.plan_study(
        f"{file}:train", seeds=planning.parse_seeds(seeds), optimizers=optimizers, options=options
    )


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "0-2-4", "1.5"])
def test_seeds_that_are_not_numbers_or_ranges_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--seeds must be numbers and ranges"):
        planning.parse_seeds(text)


def test_a_range_of_seeds_that_runs_backwards_is_refused() -> None:
    with pytest.raises(ValueError, match="write 3-9"):
        planning.parse_seeds("9-3")


@pytest.mark.parametrize("text", ["0-999999999", "0-99999999999999999999", "0-999999,5-9"])
def test_absurdly_many_seeds_are_refused_with_their_number_before_they_are_built(text: str) -> None:
    with pytest.raises(ValueError, match=r"1 optimizer × [\d,]+ seeds are [\d,]+ runs, more than the 1,000,000"):
        planning.parse_seeds(text)


def test_an_absurd_plan_is_refused_with_its_size_before_anything_is_built(task: Path) -> None:
    values = ",".join(map(str, range(200)))
    grids = {f"kbeta.{name}": values for name in ("beta1", "alpha", "eps", "warmup_steps", "beta2_min")}
    with pytest.raises(ValueError, match=r"320,000,000,000 optimizers × 1 seed are 320,000,000,000 runs"):
        planning.arms_of(["kbeta"], {}, grids)
    with pytest.raises(ValueError, match=r"200 optimizers × 10,000 seeds are 2,000,000 runs"):
        planning.plan_study(f"{task}:train", optimizers=["kbeta"], grids={"pause": values}, seeds=range(10_000))
    with pytest.raises(ValueError, match=r"200 optimizers × 10,000 seeds are 2,000,000 runs"):
        planning.plan_study(
            "rare_trigger", preset="smoke", engine="torch", grids={"steps": values}, optimizers=["kbeta"],
            seeds=range(10_000),
        )  # fmt: skip


def test_a_file_without_a_function_is_told_what_it_has(tmp_path: Path) -> None:
    file = tmp_path / "bad.py"
    file.write_text("def fit(trial):\n    return 1.0\n\ndef helper():\n    pass\n")
    with pytest.raises(
        ValueError, match=r"names no function; write FILE.py:FUNC, .*bad\.py:fit \(bad.py defines fit, helper"
    ):
        planning.code_of(str(file))
    file.write_text("x = 1\n")
    with pytest.raises(ValueError, match=r"bad\.py:train \(bad.py defines no function yet\)"):
        planning.code_of(str(file))
    file.write_text("def train(:\n")
    with pytest.raises(ValueError, match=r"bad\.py, line 1: not a Python file"):
        planning.code_of(str(file))
    with pytest.raises(ValueError, match=r"there is no file .*gone\.py"):
        planning.code_of(str(tmp_path / "gone.py"))


def test_a_set_option_reaches_its_optimizer_alone() -> None:
    settings, arms = planning.arms_of(["kbeta", "kbeta-exact"], {"steps": "1e2", "kbeta.alpha": "0.9"}, {})
    assert settings == {"steps": 100.0}
    assert {arm.label: arm.options for arm in arms} == {"kbeta": {"alpha": 0.9}, "kbeta-exact": {}}


def test_grids_make_one_arm_per_combination_of_values() -> None:
    _, arms = planning.arms_of(["kbeta", "adam95"], {}, {"kbeta.alpha": "0.85,0.9", "kbeta.warmup_steps": "0,5"})
    assert [arm.label for arm in arms] == [
        "kbeta[alpha=0.85,warmup_steps=0]",
        "kbeta[alpha=0.85,warmup_steps=5]",
        "kbeta[alpha=0.9,warmup_steps=0]",
        "kbeta[alpha=0.9,warmup_steps=5]",
        "adam95",
    ]
    assert arms[1].options == {"alpha": 0.85, "warmup_steps": 5}


def test_a_grid_over_a_setting_splits_every_arm(task: Path) -> None:
    made = planning.plan_study(f"{task}:train", optimizers=ARMS, grids={"pause": "0,0.01"})
    assert [arm.label for arm in made.arms] == [f"{name}[pause={p}]" for name in ARMS for p in ("0", "0.01")]
    assert [spec.settings["pause"] for spec in made.specs()] == [0, 0.01, 0, 0.01]


def test_an_option_of_an_optimizer_that_is_not_in_the_study_names_the_near_one() -> None:
    with pytest.raises(ValueError, match=r"unknown optimizer in `kbta\.alpha` 'kbta': did you mean 'kbeta'"):
        planning.arms_of(["kbeta", "adam95"], {"kbta.alpha": "0.9"}, {})


@pytest.mark.parametrize("text", ["steps", "=3", "steps="])
def test_an_assignment_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must look like NAME=VALUE"):
        planning.parse_assignments("settings", [text])


def test_the_same_value_written_in_two_ways_is_the_same_run(task: Path) -> None:
    def ids(steps: str, alpha: str) -> set[str]:
        made = planning.plan_study(
            "rare_trigger",
            preset="smoke",
            engine="mlx",
            optimizers=["kbeta"],
            options={"steps": steps},
            grids={"kbeta.alpha": alpha},
        )
        return {spec.id for spec in made.specs()}

    assert ids("100", "0.9,0.90") == ids("1e2", "9e-1")
    assert ids("100", "0.9") != ids("101", "0.9")


def test_an_optimizer_whose_name_holds_a_dot_can_be_given_options() -> None:
    _, (arm,) = planning.arms_of(["torch.SGD"], {"torch.SGD.momentum": "0.9"}, {})
    assert arm.options == {"momentum": 0.9}


def test_edited_code_gives_every_run_another_id(task: Path) -> None:
    before = {spec.id for spec in plan(task).specs()}
    task.write_text(TASK + "\n# edited\n")
    assert before.isdisjoint(spec.id for spec in plan(task).specs())


def test_two_arms_with_different_options_have_different_ids(task: Path) -> None:
    made = planning.plan_study(f"{task}:train", optimizers=["kbeta"], grids={"kbeta.alpha": "0.8,0.9"})
    assert len({spec.id for spec in made.specs()}) == 2


def pairs_of(*optimizers: str, **grids: str) -> list[tuple[str, str]]:
    """What is compared; `kbeta_alpha` stands for the option kbeta.alpha."""
    _, arms = planning.arms_of(optimizers, {}, {name.replace("_", "."): values for name, values in grids.items()})
    return contrasts(arms)


def test_the_first_optimizer_is_compared_with_the_others_but_not_with_controls() -> None:
    assert pairs_of("kbeta", "adam95", "kbeta-static", "lion") == [("kbeta", "adam95"), ("kbeta", "lion")]
    assert pairs_of("kbeta", "kbeta-static", "adam-mid") == [("kbeta", "kbeta-static"), ("kbeta", "adam-mid")]


def test_every_value_of_a_grid_is_compared_with_the_other_optimizers_or_the_first_with_the_rest() -> None:
    low, high = "kbeta[alpha=0.8]", "kbeta[alpha=0.9]"
    assert pairs_of("kbeta", "adam95", kbeta_alpha="0.8,0.9") == [(low, "adam95"), (high, "adam95")]
    assert pairs_of("kbeta", kbeta_alpha="0.8,0.9") == [(low, high)]
    assert pairs_of("kbeta") == []


@pytest.mark.parametrize(("seeds", "least"), [("0", "1"), ("0-2", "0.25"), ("0-4", "0.062"), ("0-5", None)])
def test_what_few_seeds_cannot_show_is_said_before_they_are_paid_for(task: Path, seeds: str, least: str | None) -> None:
    told = plan(task, seeds=seeds, optimizers=["kbeta", "adam95"]).doubts()
    advice = f"p would be {least}. It takes at least 6, and more if a run diverges: use --seeds 0-9"
    assert [advice in line for line in told] == ([True] if least else [])
    assert plan(task, seeds=seeds, optimizers=["kbeta"]).doubts() == []  # nothing is compared


def test_a_grid_over_a_setting_compares_like_with_like() -> None:
    found = pairs_of("kbeta", "adam95", "lion", lr="0.1,0.01,0.001")
    assert len(found) == 6
    assert all(a.removeprefix("kbeta") == b.removeprefix("adam95").removeprefix("lion") for a, b in found)


def test_grids_of_both_optimizers_are_no_cross_product() -> None:
    found = pairs_of("kbeta", "adam95", kbeta_alpha="0.8,0.85,0.9", adam95_beta2="0.9,0.95")
    assert len(found) == 4
    assert {arm for pair in found for arm in pair} == {
        *(f"kbeta[alpha={a}]" for a in (0.8, 0.85, 0.9)),
        *(f"adam95[beta2={b}]" for b in (0.9, 0.95)),
    }


def test_a_large_grid_has_about_as_many_contrasts_as_arms() -> None:
    values = ",".join(str(1 + i) for i in range(300))
    assert len(pairs_of("kbeta", "adam95", lr=values)) == 300
