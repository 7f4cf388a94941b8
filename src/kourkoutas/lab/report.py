"""One self-contained HTML page about a study: answers first, then every seed, effect sizes, tests, figures, settings.

`build` makes the page from a `ReportData`; `from_study` reads one from a results folder. The page holds its pictures
and style, runs no script, and its content policy forbids the browser to fetch anything.
"""

from __future__ import annotations

import base64
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from matplotlib.figure import Figure

from kourkoutas.lab import figures, stats, tables, testbeds
from kourkoutas.lab import study as studies
from kourkoutas.lab.optimizers import CONTROLS
from kourkoutas.lab.stats import Comparison, Contrast, Seed, Values
from kourkoutas.lab.store import StoredRun, Study
from kourkoutas.lab.study import PRIMARY
from kourkoutas.lab.tables import show, show_ci
from kourkoutas.lab.testbeds import Endpoint

STATUSES = ("ok", "diverged", "failed", "unfinished")


@dataclass(frozen=True)
class Run:
    """One run as the report needs it; `curve` is columns of equal length, with `step` and `loss` among them."""

    optimizer: str
    seed: Seed
    status: str
    endpoint: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    curve: Mapping[str, Sequence[float]] = field(default_factory=dict)
    trace: figures.TraceData | None = None
    error: str | None = None


@dataclass(frozen=True)
class ReportData:
    """A study as the report needs it.

    Attributes:
      title: of the page.
      study: facts for the head of the page: testbed, preset, engine, created.
      command: the exact command line.
      endpoints: the primary one first.
      arms: optimizers in the order to show them.
      seeds: all that were planned.
      runs: all that were planned, whatever became of them.
      contrasts: planned (treatment, baseline) pairs.
      settings: resolved settings of the testbed.
      options: arm → resolved optimizer options.
      environment: the machine.
      versions: of the software.
      pictures: the testbed's own, each with its description.
    """

    title: str
    study: Mapping[str, Any]
    command: str
    endpoints: Sequence[Endpoint]
    arms: Sequence[str]
    seeds: Sequence[Seed]
    runs: Sequence[Run]
    contrasts: Sequence[tuple[str, str]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[tuple[Figure, str]] = ()

    def values(self, endpoint: Endpoint) -> dict[str, dict[Seed, float]]:
        """{arm: {seed: value}}: NaN for a diverged run, nothing for a failed or unfinished one."""
        found: dict[str, dict[Seed, float]] = {}
        for arm in self.arms:
            for run in self.runs:
                if run.optimizer != arm or run.status not in ("ok", "diverged"):
                    continue
                value: float | None = math.nan
                if run.status == "ok":
                    value = run.endpoint if endpoint.metric == PRIMARY else run.metrics.get(endpoint.metric)
                if value is not None:
                    found.setdefault(arm, {})[run.seed] = value
        return found


@dataclass(frozen=True)
class Judged:
    """One endpoint's values and comparison; `comparison` is None when no two arms of a contrast share a seed."""

    endpoint: Endpoint
    values: Values
    log: bool
    comparison: Comparison | None
    notes: tuple[str, ...]


def judge(data: ReportData, endpoint: Endpoint) -> Judged:
    """Compare the planned pairs on one endpoint."""
    values = data.values(endpoint)
    numbers = [x for by_seed in values.values() for x in by_seed.values() if math.isfinite(x)]
    log = endpoint.log and all(x > 0 for x in numbers)
    notes = []
    if endpoint.log and not log:
        notes.append("Values at or below 0 have no logarithm: compared as differences instead of ratios.")
    pairs = _possible(values, data.contrasts)
    notes += [f"{a} and {b} have no seed in common: not compared." for a, b in data.contrasts if (a, b) not in pairs]
    comparison = _compare(values, pairs, endpoint, log) if values else None
    return Judged(endpoint, values, log, comparison, tuple(notes))


def _possible(values: Values, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(a, b) for a, b in pairs if a in values and b in values and not values[a].keys().isdisjoint(values[b])]


def _compare(values: Values, pairs: Sequence[tuple[str, str]], endpoint: Endpoint, log: bool) -> Comparison:
    return stats.compare_pairs(values, pairs, log=log, higher_is_better=endpoint.maximize, threshold=endpoint.threshold)


def size_of(c: Contrast, log: bool) -> str:
    """The effect with its interval, e.g. "1.099 [1.045, 1.155]"."""
    effect = c.ratio if log else c.difference
    return show_ci(effect.value, effect.ci, 4) if effect else "no pair of finite runs"


def names_of(c: Contrast, judged: Judged) -> tuple[str, str]:
    """The arms in the order in which they are divided or subtracted, so that a large value speaks for the treatment."""
    return (c.treatment, c.baseline) if judged.endpoint.maximize else (c.baseline, c.treatment)


def effect_words(c: Contrast, judged: Judged) -> str:
    """What the effect is, with the names of the two arms."""
    first, second = names_of(c, judged)
    return f"geometric-mean ratio {first}/{second}" if judged.log else f"mean difference {first} − {second}"


def answer(c: Contrast, judged: Judged) -> tuple[str, str]:
    """(short answer, plain sentence) to "does the treatment beat the baseline here?"."""
    family = len(judged.comparison.contrasts) if judged.comparison else 1
    record = f"better on {c.wins} of {c.n} seeds" + (f", equal on {c.ties}" if c.ties else "")
    effect = f"{effect_words(c, judged)} {size_of(c, judged.log)}, {record}"
    diverged = c.diverged_treatment + c.diverged_baseline
    if diverged:
        effect += (
            f"; diverged: {c.treatment} {c.diverged_treatment}, {c.baseline} {c.diverged_baseline} of {c.n}, so the "
            f"answer is by signed ranks with diverged runs as the worst, p = {show(c.wilcoxon.p, 3)}"
        )
    adjusted = c.wilcoxon.p_holm if diverged else c.t.p_holm
    care = ""
    if family > 1 and adjusted is not None and adjusted >= 1 - c.confidence:
        care = f" After Holm's adjustment for {family} comparisons p = {show(adjusted, 3)}: read it with care."
    verdict = c.verdict
    if verdict == "better":
        return "Yes", f"{c.treatment} ends better than {c.baseline} ({effect}).{care}"
    if verdict == "worse":
        return "No", f"{c.treatment} ends worse than {c.baseline} ({effect}).{care}"
    if verdict == "identical":
        return "No difference", f"{c.treatment} and {c.baseline} end with the same value on all {c.n} seeds."
    if verdict == "unclear":
        reason = "the signed ranks do not decide" if diverged else "the interval includes no difference"
        return "Not shown", f"{reason} ({effect})."
    return "Cannot tell", f"{c.notes[-1] if c.notes else 'too few pairs'} ({effect})."


@dataclass(frozen=True)
class Question:
    """One possible cause, and the contrasts that isolate it."""

    cause: str
    why: str
    pairs: tuple[tuple[str, str], ...]


QUESTIONS = (
    Question(
        "Dynamics",
        "kbeta-static keeps β2 at the midpoint and all else as kbeta: what differs is that β2 moves.",
        (("kbeta", "kbeta-static"),),
    ),
    Question(
        "Mean β2",
        "adam-mid is Adam at the midpoint β2. Against adam95 and adam999 it shows what that value alone changes; kbeta "
        "and kbeta-static against it show what the value does not explain.",
        (("adam-mid", "adam95"), ("adam-mid", "adam999"), ("kbeta", "adam-mid"), ("kbeta-static", "adam-mid")),
    ),
    Question(
        "Hidden warmup",
        "Bias correction by β2_max scales the early steps of kbeta by about √(1 − 0.999^t). The -warm arms give Adam "
        "the same factor; kbeta-exact takes it away from kbeta; kbeta-static and adam-mid differ in nothing else.",
        (
            ("adam95-warm", "adam95"),
            ("adam999-warm", "adam999"),
            ("kbeta", "adam95-warm"),
            ("kbeta", "adam999-warm"),
            ("kbeta", "kbeta-exact"),
            ("kbeta-static", "adam-mid"),
        ),
    ),
)


@dataclass(frozen=True)
class Finding:
    """One attribution contrast: the arms, the effect, and what the data support."""

    treatment: str
    baseline: str
    effect: str
    record: str
    supported: bool
    sentence: str


@dataclass(frozen=True)
class Cause:
    cause: str
    why: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Attribution:
    """The causes whose arms were run, and one summary per baseline of the difference to explain."""

    causes: tuple[Cause, ...]
    summaries: tuple[str, ...]


def attribute(judged: Judged) -> Attribution | None:
    """What a difference between kbeta and Adam comes from, as far as the control arms show; None without controls."""
    values = judged.values
    if not any(arm in values for arm in CONTROLS):
        return None
    wanted = [pair for q in QUESTIONS for pair in q.pairs] + [("kbeta", "adam95"), ("kbeta", "adam999")]
    pairs = list(dict.fromkeys(_possible(values, wanted)))
    if not pairs:
        return None
    found = {(c.treatment, c.baseline): c for c in _compare(values, pairs, judged.endpoint, judged.log).contrasts}
    causes = tuple(
        Cause(q.cause, q.why, tuple(_finding(found[pair], judged.log) for pair in q.pairs if pair in found))
        for q in QUESTIONS
        if any(pair in found for pair in q.pairs)
    )
    summaries = tuple(
        _explain(found, baseline, judged.log) for baseline in ("adam95", "adam999") if ("kbeta", baseline) in found
    )
    return Attribution(causes, summaries)


def _finding(c: Contrast, log: bool) -> Finding:
    sentence = {
        "better": f"Supported: {c.treatment} ends better than {c.baseline}.",
        "worse": f"Supported: {c.treatment} ends worse than {c.baseline}.",
        "unclear": "Not supported: the data do not exclude that there is no difference.",
        "identical": "No difference: equal on every seed.",
        "untested": "Not tested: too few finite pairs, or no variance.",
    }[c.verdict]
    if c.verdict in ("better", "worse") and (c.diverged_treatment or c.diverged_baseline):
        sentence += " (By ranks: runs diverged.)"
    record = f"{c.wins}/{c.ties}/{c.losses}"
    return Finding(c.treatment, c.baseline, size_of(c, log), record, c.verdict in ("better", "worse"), sentence)


def _explain(found: Mapping[tuple[str, str], Contrast], baseline: str, log: bool) -> str:
    """Which single causes move the result the way kbeta differs from `baseline`."""
    main = found["kbeta", baseline]
    if main.verdict not in ("better", "worse"):
        return f"kbeta against {baseline} ({size_of(main, log)}): the data support no difference that needs a cause."
    causes = {
        "the dynamics of β2": [("kbeta", "kbeta-static")],
        "the mean value of β2": [("adam-mid", baseline)],
        "the hidden warmup": [(f"{baseline}-warm", baseline), ("kbeta", "kbeta-exact"), ("kbeta-static", "adam-mid")],
    }
    words: dict[str, list[str]] = {"yes": [], "no": [], "against": [], "open": []}
    for cause, pairs in causes.items():
        verdicts = [found[pair].verdict for pair in pairs if pair in found]
        if not verdicts:
            words["open"].append(cause)
        elif main.verdict in verdicts:
            mixed = f" (in {verdicts.count(main.verdict)} of {len(verdicts)} contrasts)" if len(verdicts) > 1 else ""
            words["yes"].append(cause + mixed)
        elif any(v in ("better", "worse") for v in verdicts):
            words["against"].append(cause)
        else:
            words["no"].append(cause)
    text = f"kbeta ends {main.verdict} than {baseline} ({size_of(main, log)})."
    endings = (
        ("yes", "The data support as a cause: {}."),
        ("against", "Acting the other way: {}."),
        ("no", "Not supported as a cause: {}."),
        ("open", "Not examined, for lack of the arm: {}."),
    )
    text += "".join(" " + ending.format(", ".join(words[key])) for key, ending in endings if words[key])
    left = found.get(("kbeta", f"{baseline}-warm"))
    if left is not None and left.verdict != "untested":
        rest = (
            "a difference remains"
            if left.verdict == main.verdict
            else f"kbeta ends {left.verdict}"
            if left.verdict in ("better", "worse")
            else "the data support no remaining difference"
        )
        text += f" Against {baseline} with the same warmup {rest} ({size_of(left, log)})."
    return text


@dataclass(frozen=True)
class Picture:
    """An inlined SVG with its description for those who cannot see it."""

    source: str
    description: str


def picture(figure: Figure, description: str) -> Picture:
    encoded = base64.b64encode(figures.svg(figure)).decode("ascii")
    return Picture(f"data:image/svg+xml;base64,{encoded}", description)


def _pictures(judged: Judged) -> list[Picture]:
    title, maximize = judged.endpoint.title, judged.endpoint.maximize
    contrasts = judged.comparison.contrasts if judged.comparison else ()
    drawn = [
        picture(
            figures.pairs(contrasts, log=judged.log, higher_is_better=maximize, label=title),
            f"Each seed's pair: {title}",
        ),
        picture(
            figures.endpoints(judged.values, log=judged.log, higher_is_better=maximize, label=title),
            f"Every run: {title}",
        ),
    ]
    if judged.comparison:
        drawn.append(picture(figures.forest(judged.comparison), f"Effects with intervals: {title}"))
    return drawn


def _training(data: ReportData) -> list[Picture]:
    curves: dict[str, dict[Seed, figures.Curve]] = {}
    for arm in data.arms:
        for run in data.runs:
            steps, losses = run.curve.get("step"), run.curve.get("loss")
            if run.optimizer == arm and steps and losses:
                # a diverged run ends where its last record was finite: the closing NaN makes the figure mark it
                cut = run.status == "diverged" and math.isfinite(losses[-1])
                curve = ([*steps, steps[-1]], [*losses, math.nan]) if cut else (steps, losses)
                curves.setdefault(arm, {})[run.seed] = curve
    # The schedule that all arms share, not the one that a -warm arm makes of it.
    plain = [
        run.curve for run in data.runs if run.curve.get("lr") and not run.optimizer.partition("[")[0].endswith("-warm")
    ]
    lr = (plain[0]["step"], plain[0]["lr"]) if plain else None
    return [picture(figures.loss_curves(curves, lr=lr), "Training loss against step, every seed and mean ± sd")]


def _traces(data: ReportData) -> list[Picture]:
    found = []
    for arm in data.arms:
        traces = [run.trace for run in data.runs if run.optimizer == arm and run.trace is not None]
        if traces:
            what = f"{arm}, {len(traces)} run{'s' if len(traces) > 1 else ''}"
            violins, densities = figures.violins(traces, title=arm), figures.densities(traces, title=arm)
            found.append(picture(violins, f"sun and β2 in windows of training, all buckets: {what}"))
            found.append(picture(densities, f"Density of sun and β2 over training, all buckets: {what}"))
    return found


def render(data: ReportData) -> str:
    """The page as text."""
    judged = [judge(data, endpoint) for endpoint in data.endpoints]
    sections = [
        {
            "judged": j,
            "pictures": _pictures(j),
            "notes": [*j.notes, *(tables.all_notes(j.comparison) if j.comparison else ())],
            "attribution": attribute(j),
        }
        for j in judged
    ]
    counts = {
        arm: {status: sum(r.optimizer == arm and r.status == status for r in data.runs) for status in STATUSES}
        for arm in data.arms
    }
    template = _template()
    return template.render(
        data=data,
        sections=sections,
        answers=_answers(judged),
        statuses=STATUSES,
        counts=counts,
        failed=[run for run in data.runs if run.status == "failed"],
        training=_training(data),
        pictures=[picture(figure, description) for figure, description in data.pictures],
        traces=_traces(data),
        runs={(run.optimizer, run.seed): run for run in data.runs},
        options=_options(data.options),
    )


def _answers(judged: Sequence[Judged]) -> dict[tuple[str, str], list[tuple[Judged, Contrast, str, str]]]:
    """For each planned pair, in order, the answer on every endpoint."""
    found: dict[tuple[str, str], list[tuple[Judged, Contrast, str, str]]] = {}
    for j in judged:
        for c in j.comparison.contrasts if j.comparison else ():
            found.setdefault((c.treatment, c.baseline), []).append((j, c, *answer(c, j)))
    return found


def _options(options: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {arm: given for arm, given in options.items() if given}


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kourkoutas.lab", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tools: dict[str, Callable[..., Any]] = {
        "show": show,
        "show_ci": show_ci,
        "show_effect": tables.show_effect,
        "antilog": stats.antilog,
        "size_of": size_of,
        "names_of": names_of,
        "rows_of_tests": tables.rows_of_tests,
    }
    environment.globals.update(tools)
    return environment.get_template("report.html.j2")


def from_study(study: Study) -> ReportData:
    """What the results folder of a study holds, for the report."""
    record, stored = study.record, study.runs()
    finished = {run.spec.optimizer: run.result.settings for run in stored if run.result and run.result.settings}
    resolved = next(iter(finished.values()), record.settings)
    seconds = sum(run.result.seconds for run in stored if run.result)
    arms = [arm.label for arm in record.arms]
    return ReportData(
        title=f"Study: {record.testbed}",
        study={
            "preset": record.preset,
            "engine": record.engine,
            "seeds": ", ".join(map(str, record.seeds)),
            "begun": record.created,
            "compute": f"{seconds:.3g} s in {len(stored)} runs",
        },
        command="\n".join(dict.fromkeys(call.command for call in record.calls)),
        endpoints=studies.endpoints(study),
        arms=arms,
        seeds=record.seeds,
        runs=[_run(run) for run in stored],
        contrasts=studies.contrasts(record, arms),
        settings={name: value for name, value in resolved.items() if name != "optimizer"},
        options={arm: finished[arm]["optimizer"] for arm in arms if "optimizer" in finished.get(arm, {})},
        environment=record.environment,
        versions=record.versions,
        pictures=_own_pictures(study, stored),
    )


def _own_pictures(study: Study, stored: Sequence[StoredRun]) -> list[tuple[Figure, str]]:
    """What the testbed draws of final parameters: those of the first seed that most arms finished, by arm."""
    record = study.record
    draw = None if record.code else getattr(testbeds.get(record.testbed), "figures", None)
    done = [run for run in stored if run.result and run.result.status == "ok" and (run.folder / "params.npz").exists()]
    if draw is None or not done:
        return []
    seeds = [run.spec.seed for run in done]
    chosen = [run for run in done if run.spec.seed == max(record.seeds, key=seeds.count)]
    # One picture shows one model: arms whose settings differ, as in a grid over settings, are left out.
    shared = chosen[0].spec.settings
    params = {}
    for run in chosen:
        if run.spec.settings == shared:
            with (run.folder / "params.npz").open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                params[run.spec.optimizer] = {name: file[name] for name in file.files}
    settings = testbeds.settings_of(testbeds.get(record.testbed), record.preset, shared)
    title = f"seed {chosen[0].spec.seed}"
    return [(figure, f"{description} ({title})") for figure, description in draw(settings, params)]


def _run(run: StoredRun) -> Run:
    trace = run.trace()
    recorded = None if trace is None else figures.TraceData(trace["steps"], trace["sun"], trace["beta2"])
    if run.result is None:
        return Run(run.spec.optimizer, run.spec.seed, "unfinished", trace=recorded)
    return Run(
        optimizer=run.spec.optimizer,
        seed=run.spec.seed,
        status=run.result.status,
        endpoint=run.result.endpoint,
        metrics=run.result.metrics,
        curve=run.result.curve,
        trace=recorded,
        error=run.result.error,
    )


def build(source: Study | ReportData, out: str | Path | None = None) -> Path:
    """Write the page and return its path.

    Args:
      source: a results folder, or the data of one.
      out: the file to write; report.html in the results folder unless given.
    """
    if isinstance(source, ReportData):
        if out is None:
            raise ValueError("`out` must name the file to write; got None with data that belong to no results folder")
        data = source
    else:
        data, out = from_study(source), out or source.path / "report.html"
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    # in one move, so that a reader never sees half a page
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    temporary.write_text(render(data), encoding="utf-8")
    os.replace(temporary, out)
    return out
