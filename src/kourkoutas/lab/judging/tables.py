"""Tables of results: reading anybody's CSV, and printing a comparison."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kourkoutas.lab.judging.fitting import Fitting
from kourkoutas.lab.judging.power import MOST_SEEDS
from kourkoutas.lab.judging.stats import Comparison, Contrast, Interval, Seed, all_notes
from kourkoutas.lab.judging.verdicts import floor_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kourkoutas.lab.judging.analysis import Analysis, Finding, Judged
    from kourkoutas.lab.judging.power import Detectable, Needed

MOST_ROWS = 200
MOST_COLUMNS = 30

COLUMNS = ("seed", "optimizer", "value")


def read_table(path: str | Path) -> dict[str, dict[Seed, float]]:
    """{optimizer: {seed: value}} from a text table with the columns seed, optimizer and value, in any order.

    Comma, semicolon or tab separate; other columns are ignored; `nan` and `inf` stand for a diverged run.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give a table with the columns {', '.join(COLUMNS)}") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a folder; give a table with the columns {', '.join(COLUMNS)}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the table as UTF-8 text") from None
    head = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(text.splitlines(), delimiter=delimiter)
    header: list[str] | None = None
    raw: dict[tuple[str, str], tuple[int, float]] = {}
    for row in reader:
        line = reader.line_num
        if not any(cell.strip() for cell in row):
            continue
        if header is None:
            header = [cell.strip().lower() for cell in row]
            for name in COLUMNS:
                if header.count(name) != 1:
                    what = "is missing" if name not in header else "appears more than once"
                    raise ValueError(
                        f"{path}, line {line}: column {name!r} {what} (found {', '.join(header)}); "
                        f"the first line must name the columns {', '.join(COLUMNS)}"
                    )
            continue
        if len(row) != len(header):
            raise ValueError(
                f"{path}, line {line}: {len(row)} fields where the first line names {len(header)} columns; "
                f"add or remove {'field' if abs(len(row) - len(header)) == 1 else 'fields'} (separator {delimiter!r})"
            )
        cells = {name: row[header.index(name)].strip() for name in COLUMNS}
        for name in ("seed", "optimizer"):
            if not cells[name]:
                raise ValueError(f"{path}, line {line}, column {name!r}: empty; fill in the {name}")
        try:
            value = float(cells["value"])
        except ValueError:
            raise ValueError(
                f"{path}, line {line}, column 'value': {cells['value']!r} is not a number; "
                "write it as 0.0012 or 1.2e-3, or nan for a diverged run"
            ) from None
        key = (cells["optimizer"], cells["seed"])
        if key in raw:
            raise ValueError(
                f"{path}, line {line}, column 'seed': {key[0]!r} has seed {key[1]} already on line {raw[key][0]}; "
                "keep one value per optimizer and seed"
            )
        raw[key] = (line, value)
    if not raw:
        raise ValueError(f"{path}: holds no rows; give one line per run under the columns {', '.join(COLUMNS)}")
    whole = all(seed.removeprefix("-").isdecimal() for _, seed in raw)
    values: dict[str, dict[Seed, float]] = {}
    lines: dict[tuple[str, Seed], int] = {}
    for (name, text), (line, value) in raw.items():
        number: Seed = int(text) if whole else text
        before = lines.setdefault((name, number), line)
        if before != line:  # 1 and 01
            raise ValueError(
                f"{path}, line {line}, column 'seed': {name!r} has seed {number} already on line {before}; keep one "
                "value per optimizer and seed"
            )
        values.setdefault(name, {})[number] = value
    return values


def show(value: float | None, digits: int = 4) -> str:
    """A number for people: `digits` significant figures, "–" for None, "diverged" for what is not finite."""
    if value is None:
        return "–"
    return f"{value:.{digits}g}" if math.isfinite(value) else "diverged"


def show_ci(value: float | None, ci: Interval | None, digits: int = 5) -> str:
    """value [low, high]."""
    return show(value, digits) + ("" if ci is None else f" [{show(ci.low, digits)}, {show(ci.high, digits)}]")


def effect_name(comparison: Comparison) -> str:
    """What the effect of a contrast is: a ratio or a difference that speaks for the treatment when large."""
    order = ("treatment", "baseline") if comparison.higher_is_better else ("baseline", "treatment")
    return f"geometric-mean ratio {'/'.join(order)}" if comparison.log else f"mean difference {' − '.join(order)}"


def show_effect(spread: float, log: bool, digits: int = 4) -> str:
    """A ratio or difference of ranks, in which an infinite entry stands for a diverged run."""
    if math.isfinite(spread) and not (log and spread == 0):
        return show(spread, digits)
    return "baseline diverged" if spread > 0 else "treatment diverged"


def render(comparison: Comparison, *, seeds: bool = True, notes: Sequence[str] | None = None) -> RenderableType:
    """Tables for a rich console: every seed, each optimizer, effect sizes, then tests and notes.

    NOTE: a console is for reading. Of very many arms or contrasts the first `MOST_ROWS` are printed, and how many there
    are; JSON and `kbeta export` hold all.
    """
    from rich.console import Group
    from rich.text import Text

    log, level = comparison.log, f"{100 * comparison.confidence:g} %"
    digits = 5 if log else 3
    parts: list[RenderableType] = [_every_seed(comparison)] if seeds else []

    middle = "geometric mean" if log else "mean ± sd"
    arms = Fitting("Each optimizer", ["", "runs", "diverged", "median [IQR]", middle])
    success = [f"success [{level}]"] if comparison.threshold is not None else []
    robust = Fitting("", ["", f"IQM [{level}]", *success])
    for s in comparison.summaries[:MOST_ROWS]:
        mean = show(s.geometric_mean) if log else show(s.mean) + (f" ± {show(s.sd, 2)}" if s.sd is not None else "")
        spread = f"{show(s.median)} [{show(s.q1)}, {show(s.q3)}]"
        arms.add_row(s.optimizer, str(s.n), str(s.diverged), spread, mean)
        rate = [f"{s.success.successes}/{s.success.n}: {show_ci(s.success.rate, s.success.ci, 3)}"] if s.success else []
        robust.add_row(s.optimizer, show_ci(s.iqm, s.iqm_ci, 4), *rate)

    title = f"Effect sizes: {effect_name(comparison)}; {'> 1' if log else '> 0'} speaks for the first named"
    effects = Fitting(title, ["", "w/t/l", f"P(better) [{level}]", f"{'ratio' if log else 'difference'} [{level}]"])
    sizes = Fitting("", ["", f"BCa [{level}]", "median", "d_z", "r", "rank-bis."], words=["median"])
    heading = f"Tests, two-sided, paired by seed{' on log10' if log else ''}"
    tests = Fitting(heading, ["", "test", "statistic", "p", "Holm p"], words=["test", "statistic"])
    for c in comparison.contrasts[:MOST_ROWS]:
        label, size = f"{c.treatment} vs {c.baseline}", c.ratio if log else c.difference
        effects.add_row(
            label,
            f"{c.wins}/{c.ties}/{c.losses}",
            show_ci(c.improvement, c.improvement_ci, 2),
            show_ci(size.value, size.ci, digits) if size else "–",
        )
        boot = size.bootstrap_ci if size else None
        sizes.add_row(
            label,
            f"[{show(boot.low, digits)}, {show(boot.high, digits)}]" if boot else "–",
            show_effect(c.median, log),
            show(c.t.d_z, 3),
            show(c.t.r, 3),
            show(c.wilcoxon.rank_biserial, 3),
        )
        for name, statistic, p, adjusted in rows_of_tests(c):
            tests.add_row(label, name, statistic, p, adjusted)
            label = ""
    parts += [arms, robust, effects, sizes, tests]
    told = [*(all_notes(comparison) if notes is None else notes), *_left_out(comparison)]
    parts.extend(Text(f"Note: {note}") for note in told)
    return Group(*parts)


def _every_seed(comparison: Comparison) -> RenderableType:
    """One row per seed; of many seeds as plain lines, since a console table takes long to lay out."""
    from rich.text import Text

    arms = list(comparison.values)[:MOST_COLUMNS]
    rows = [
        [
            str(seed),
            *(show(comparison.values[arm][seed], 6) if seed in comparison.values[arm] else "missing" for arm in arms),
        ]
        for seed in comparison.seeds
    ]
    if len(rows) > MOST_ROWS:
        return Text("\n".join("  ".join(row) for row in [["Every seed:", *arms], *rows]))
    every = Fitting("Every seed", ["seed", *arms])
    for row in rows:
        every.add_row(*row)
    return every


def _left_out(comparison: Comparison) -> list[str]:
    """What was not printed because there is so much of it."""
    notes = []
    if len(comparison.values) > MOST_COLUMNS:
        notes.append(
            f"every seed of the first {MOST_COLUMNS} of {len(comparison.values)} optimizers is shown; --json has all"
        )
    if len(comparison.contrasts) > MOST_ROWS:
        notes.append(f"the first {MOST_ROWS} of {len(comparison.contrasts)} contrasts are shown; --json has all")
    return notes


def render_arms(analysis: Analysis) -> RenderableType:
    """One row per arm: how its runs ended, the primary endpoint, and the time."""
    ends = ["ok", "diverged", "failed", *(["unfinished"] if any(arm.unfinished for arm in analysis.arms) else [])]
    tuned = list(dict.fromkeys(name for arm in analysis.arms for name in arm.chosen))
    rows = Fitting("", ["optimizer", *tuned, "runs", *ends, "median", "mean", "s/run", "s/step"])
    for arm in analysis.arms[:MOST_ROWS]:
        counts = [show(arm.chosen.get(name)) for name in tuned]
        counts += [str(getattr(arm, key)) for key in ("runs", *ends)]
        numbers = [show(arm.median), show(arm.mean), show(arm.seconds, 3), show(arm.seconds_per_step, 3)]
        rows.add_row(arm.label, *counts, *numbers)
    return rows


def render_analysis(analysis: Analysis) -> RenderableType:
    """The answers by the one rule, what the controls attribute, then every endpoint in full."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = []
    if analysis.headline:
        parts.append(Text(f"\nBy {analysis.primary.title}:", style="bold"))
        parts.extend(Text(line) for line in analysis.headline[:MOST_ROWS])
        parts.extend(Text(one.sentence) for one in analysis.primary.attribution)
        parts.append(Text(analysis.rule, style="dim"))
    parts.extend(render_judged(judged) for judged in analysis.endpoints)
    parts.extend(Text(f"Note: {note}") for note in analysis.notes)
    return Group(*parts)


def render_power(
    title: str,
    rows: Sequence[tuple[Finding, Detectable | None, Sequence[Needed | None]]],
    differences: Sequence[str],
    probability: float,
) -> RenderableType:
    """What the seeds could have shown, and the seeds that each difference needs."""
    made = Fitting(
        f"{title}: found with {100 * probability:g} % probability",
        ["", "seeds", "they find", "observed", "it needs", *(f"for {text}" for text in differences)],
    )
    for finding, shown, needed in rows:
        label = f"{finding.treatment} vs {finding.baseline}"
        if shown is None:
            made.add_row(label, str(finding.n), *["–"] * (3 + len(differences)))
            continue
        find = f"{shown.percent:.3g} %" if shown.percent is not None else show(shown.difference, 3)
        seen = f"{finding.percent:.3g} %" if finding.percent is not None else show(finding.effect, 3)
        seeds = ["–" if one is None else _seeds(one.seeds) for one in needed]
        made.add_row(label, str(shown.seeds), find, seen, _seeds(shown.seeds_for_observed), *seeds)
    return made


def _seeds(count: int | None) -> str:
    return f"> {MOST_SEEDS}" if count is None else str(count)


def render_judged(judged: Judged) -> RenderableType:
    """One endpoint in full."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(f"\nEndpoint: {judged.title} ({standing(judged)})", style="bold")]
    if not judged.primary:
        parts.extend(Text(f"{f.answer}: {f.sentence}") for f in judged.findings[:MOST_ROWS])
    if judged.comparison is not None:
        parts.append(render(judged.comparison, notes=judged.notes))
    else:
        parts.extend(Text(f"Note: {note}") for note in judged.notes)
    return Group(*parts)


def standing(judged: Judged) -> str:
    """Primary, secondary, or secondary and chosen with the results in view."""
    if judged.primary:
        return "primary"
    return "secondary" if judged.declared else "secondary, asked for after the runs"


def wilcoxon_name(c: Contrast) -> str:
    """With its kind, and with what so few pairs cannot show."""
    floor = floor_of(c.wilcoxon, c.family, c.confidence)
    return f"Wilcoxon ({c.wilcoxon.method}{f'; {floor}' if floor else ''})"


def rows_of_tests(c: Contrast) -> list[tuple[str, str, str, str]]:
    """(test, statistic, p, Holm-adjusted p) of a contrast, for a table."""
    t = "undefined" if c.t.t is None else f"t({c.t.df}) = {c.t.t:.3f}"
    w = "undefined" if c.wilcoxon.statistic is None else f"W = {c.wilcoxon.statistic:g}, n = {c.wilcoxon.n}"
    rows = [
        ("paired t", t, show(c.t.p, 3), show(c.t.p_holm, 3)),
        (wilcoxon_name(c), w, show(c.wilcoxon.p, 3), show(c.wilcoxon.p_holm, 3)),
        ("sign", f"{c.sign.wins} to {c.sign.losses}", show(c.sign.p, 3), show(c.sign.p_holm, 3)),
    ]
    if c.mcnemar:
        against = f"only {c.treatment} {c.mcnemar.only_treatment}, only {c.baseline} {c.mcnemar.only_baseline}"
        rows.append(("McNemar (exact)", against, show(c.mcnemar.p, 3), show(c.mcnemar.p_holm, 3)))
    return rows
