"""One run's part of the report, section by section."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pe_lab.evaluation.suites import AVERAGED
from pe_lab.page import provenance, run_charts
from pe_lab.page.charts import history_chart, line_charts, position_chart, score_chart
from pe_lab.page.colours import Style
from pe_lab.page.maps import analysis_maps, needle_figures, needle_legend
from pe_lab.page.markup import Markup, element, folded, note, text
from pe_lab.page.plot import PlotAxis, axis_number
from pe_lab.page.provenance import pairs
from pe_lab.page.tables import (
    beta_table,
    duel_board,
    harness_table,
    marks,
    measured_at,
    plain_table,
    records_table,
    score_table,
    task_table,
    weights_table,
)
from pe_lab.page.variants import ABOUT, SCORED, assign_styles, suite_title, table_title, task_name, task_suites
from pe_lab.results.figures import HeatMaps
from pe_lab.results.formatting import duration, listing
from pe_lab.results.records import as_dict
from pe_lab.results.runs import RunFiles
from pe_lab.results.scores import (
    averages,
    build_tables,
    by_sequence_length,
    columns_of,
    histories,
    latest,
    measure,
    variants_of,
)
from pe_lab.results.standing import cautions, former_models, usable
from pe_lab.results.table import Table
from pe_lab.results.variants import is_dropped, is_rotary
from pe_lab.results.verdict import Verdict, imported_headline, judge

STORY = (
    "A language model was trained with RoPE, a rotary positional encoding. Then the encoding was removed (the "
    "“dropped” model, DroPE) and the model trained on for a little while, on sequences of the same length. This page "
    "measures each variant of these models on sequences longer than any they were trained on."
)
CAPTIONS = {
    "perplexity": "Each curve is the perplexity of tokens at that place in the sequence, averaged over sequences. A "
    "model that uses long context goes on falling to the right; one that breaks rises where the training length ends.",
    "needles": "A needle's question may come soon after the fact or long after. Right of the marked line the distance "
    "itself is longer than any the model was trained on.",
}


@dataclass(frozen=True)
class Results:
    """A run with its tables by suite, its verdict, and a style for each label.

    `task_tables` holds the tables of suites that are asked with prompts, one for each task, in the page's order.
    """

    run: RunFiles
    tables: dict[str, list[Table]]
    task_tables: dict[str, list[Table]]
    verdict: Verdict
    styles: Mapping[str, Style]

    @property
    def all_tables(self) -> list[Table]:
        return [table for found in self.tables.values() for table in found]


def work_out(run: RunFiles) -> Results:
    """Tables, verdict and styles of a run."""
    suites = [*SCORED, *sorted(set(run.evaluation) - set(SCORED) - {"beta"})]
    found = {suite: build_tables(suite, [run]) for suite in suites}
    prompted = {suite: [table for table in found[suite] if table.prompted] for suite in task_suites(found)}
    asked = {suite: tables for suite, tables in prompted.items() if tables}
    first = [usable(run, found[suite][0]) if found[suite] else None for suite in SCORED]
    verdict = judge(*first, run.source)
    if asked and not any(table and table.cells for table in first):
        words = f"Measured here: {listing([suite_title(suite) for suite in asked])}."
        if run.source:
            words = f"{imported_headline(next(iter(asked.values()))[0], run.source)} {words}"
        else:
            words += " Perplexity and symbolic needles, which a verdict is made of, were not."
        verdict = Verdict(words, "missing")
    if run.analyses and not any(found.values()):
        titles = [analysis_title(directory, analysis.name) for directory, analysis in run.analyses.items()]
        verdict = Verdict(f"Analyzed here: {listing(titles)}.", "missing")
    verdict = replace(verdict, cautions=cautions(run))
    styles = assign_styles(variants_of([table for tables in found.values() for table in tables]))
    return Results(run, found, asked, verdict, styles)


def section(level: int, title: str, identity: str, *children: object) -> Markup:
    """A section with its heading; "" if it would be empty."""
    body = text(children)
    return element("section", element(f"h{level}", title, id=identity), body) if body else Markup("")


def title_of(sentence: str) -> Markup:
    """The title of a page."""
    return element("h1", sentence, class_="long" if len(sentence) > 180 else None)


def bullets(sentences: list[str], look: str | None = None) -> Markup:
    """Sentences as a list; "" without any."""
    items = [element("li", sentence) for sentence in sentences]
    return element("ul", items, class_=look) if items else Markup("")


def top(results: Results, level: int) -> Markup:
    """The verdict of a run, its duels and its summary. At level 1 the first sentence is the page's title."""
    verdict = results.verdict
    title, *more = verdict.sentences
    first = title_of(title) if level == 1 else element("p", title, class_="lede")
    return element(
        "div",
        note(verdict.cautions[0], *(element("p", more) for more in verdict.cautions[1:])) if verdict.cautions else None,
        first,
        [element("p", sentence, class_="lede") for sentence in more],
        element("p", story, class_="soft") if level == 1 and (story := _story(results)) else None,
        bullets(verdict.details, "points"),
        _how_to_evaluate(results),
        duel_board(verdict.duels),
        provenance.summary(results.run),
    )


def _story(results: Results) -> str:
    """What was done to the model, in plain words; "" unless both RoPE and a dropped model were measured."""
    records = [record for table in results.all_tables for record in table.rows.values()]
    if not (any(map(is_dropped, records)) and any(map(is_rotary, records))):
        return ""
    partial = sorted({model for record in records if (model := str(record.get("model", ""))).startswith("p-RoPE ")})
    return " ".join([STORY, *(f"{model} rotates that share of the pairs, the fastest ones." for model in partial)])


def _how_to_evaluate(results: Results) -> Markup | None:
    """The command that evaluates a run; None if it was evaluated, or has analyses and no phase."""
    if results.all_tables or (results.run.analyses and not results.run.phases):
        return None
    run = results.run
    unfinished = [phase.name for phase in run.phases if phase.running]
    state = f"Training is not complete (phase {unfinished[-1]}). " if unfinished else ""
    command = f"python -m pe_lab.evaluate --from={run.directory}"
    return note([state, "To measure it: ", element("code", command)])


def problem_note(run: RunFiles) -> Markup:
    """The problems that the files of a run have; "" without any."""
    return note("Some files were missing or incomplete:", bullets(run.problems)) if run.problems else Markup("")


def run_sections(results: Results, level: int, prefix: str) -> list[tuple[str, str, Markup]]:
    """(identity, name in the navigation, HTML) of each section of a run below its verdict; headings of `level`."""
    run = results.run
    analyses = [(f"analysis-{n}", title, title, parts) for n, (title, parts) in enumerate(analysis_parts(run))]
    sections = (
        ("results", "Results", "Past the training length", _result_parts(results)),
        ("history", "By tokens trained", "Scores by tokens trained", _history_parts(results)),
        ("depth", "Heat maps", "Needles by depth and length", _depth_parts(results, level + 1)),
        ("tasks", "Tasks", "Tasks asked in prompts", _task_parts(results, level + 1)),
        ("position", "Where in the sequence", "Where in the sequence", _position_parts(results)),
        ("training", "Training", "Training", _training_parts(results)),
        ("frequencies", "Frequencies", "Frequencies under each scaling", _frequency_parts(results)),
        *analyses,
        ("run", "What was run", "What was run", [] if run.members else [provenance.what_was_run(run)]),
        ("caveats", "Keep in mind", "What to keep in mind", [bullets(provenance.caveats(run))]),
    )
    drawn = [(key, name, section(level, title, prefix + key, *parts)) for key, name, title, parts in sections]
    return [(key, name, part) for key, name, part in drawn if part]


def _result_parts(results: Results) -> list[object]:
    """Tables and their charts: the two main ones side by side, then everything else but the prompted tasks."""
    run, styles = results.run, results.styles
    main = [results.tables[suite][0] for suite in SCORED if results.tables[suite]]
    measured = [table for table in results.all_tables if not table.prompted]
    rest = [table for table in measured if table not in main and table.cells]
    parts: list[object] = []
    if main:
        several = len(results.tables["perplexity"]) > 1
        words = f"Rows are variants, columns are sequence lengths. {marks([run])}; deeper green is better."
        charts = [
            score_chart(table, styles, f"{suite_title(table.suite)} against length") for table in main if table.cells
        ]
        parts += [
            element("p", words, class_="soft"),
            provenance.mixture_note(run),
            element("div", [score_table(table, styles, several) for table in main], class_="grid"),
            element("div", charts, class_="grid", style="margin-top:22px"),
        ]
    if rest:
        grid = [score_table(table, styles, True) for table in rest]
        parts.append(element("div", grid, class_="grid", style="margin-top:28px"))
    for suite, records in sorted(run.evaluation.items()):
        if suite not in (*SCORED, "beta") and not any(measure(record) for record in records):
            parts.append(records_table(suite, records))
    if run.evaluation.get("beta"):
        small = element("small", "(losses in nats per token)")
        parts.append(element("p", "The fitted logit scale β ", small, class_="title", style="margin-top:28px"))
        parts.append(beta_table(latest(run.evaluation["beta"])))
    return [*parts, _weights(measured) if measured else None] if parts else []


def _weights(measured: list[Table]) -> Markup:
    """The checkpoints behind the rows of some tables, folded."""
    return folded("Weights behind each row", weights_table(measured))


def _history_parts(results: Results) -> list[object]:
    """Scores of the checkpoints of a phase: the longest sequences of each suite, the others folded."""
    drawn: dict[str, list[Markup]] = {}
    for suite in results.tables:
        for phase, column, table in histories(results.run, suite):
            if chart := history_chart(phase, column, table, results.styles):
                drawn.setdefault(f"{suite}, {phase}", []).append(chart)
    if not drawn:
        return []
    words = "Each dot is a checkpoint. The tables of this page have the last checkpoint of each phase."
    first = [chart for chart, *_ in drawn.values()]
    rest = [chart for _, *others in drawn.values() for chart in others]
    more = folded("At the other lengths", element("div", rest, class_="grid")) if rest else None
    return [element("p", words, class_="soft"), element("div", first, class_="grid"), more]


def _depth_parts(results: Results, level: int) -> list[object]:
    """Heat maps of every task with needles."""
    parts: list[object] = []
    for found in (results.tables["needles"][:1], *results.task_tables.values()):
        parts += needle_figures(found, results.styles, level)
    words = (
        "Each cell is the per cent of needles found at one depth of sequences of one length: 0% is the beginning of "
        "the sequence, 100% its end, next to the question. A variant that carries over to longer sequences is as deep "
        "a green on the right as at the training length."
    )
    return [element("p", words, class_="soft"), needle_legend(), *parts] if parts else []


def _task_parts(results: Results, level: int) -> list[object]:
    """Every suite that is asked with prompts."""
    parts: list[object] = []
    for suite, found in results.task_tables.items():
        parts += suite_parts(suite, found, results.styles, level, results.run.training_length)
    if not parts:
        return []
    words = f"Prompts are put to the model, and its answers are scored. {marks([results.run], 'task')}."
    measured = [table for found in results.task_tables.values() for table in found]
    return [element("p", words, class_="soft"), *parts, _weights(measured)]


def _position_parts(results: Results) -> list[object]:
    """Curves by position and by distance: the longest sequences in full, shorter ones folded."""
    parts: list[object] = []
    for suite, caption in CAPTIONS.items():
        for table in results.tables[suite][:1]:
            draw = partial(position_chart, results.run, table, styles=results.styles)
            drawn = [(column, half) for column in reversed(table.columns) if (half := draw(column, size="half"))]
            if not drawn:
                continue
            parts.append(draw(drawn[0][0], size="wide", caption=caption))
            if others := [half for _, half in drawn[1:]]:
                grid = element("div", others, class_="grid")
                parts.append(folded(f"{suite_title(suite)} at the other lengths", grid))
    return parts


def _training_parts(results: Results) -> list[object]:
    """Lineage and losses."""
    run = results.run
    if not run.phases:
        return [element("p", "No phase of training was found in this directory.", class_="soft")]
    chart = run_charts.loss_chart(run) or element("p", "No losses have been logged yet.", class_="soft")
    return [
        provenance.lineage_diagram(run),
        chart,
        run_charts.event_table(run),
        provenance.mixture_table(run),
        run_charts.source_losses(run),
        run_charts.suite_charts(run),
        run_charts.learned_charts(run),
        run_charts.time_chart(run),
    ]


def _frequency_parts(results: Results) -> list[object]:
    """The scalings at the factors that were evaluated."""
    rotation = run_charts.rotation_of(results.run)
    if rotation is None:
        return []
    base, head_dim, length = rotation
    factors = sorted({c.factor for table in results.all_tables for c in table.columns if c.factor})
    words = (
        f"RoPE rotates each of the {head_dim // 2} pairs of channels of a head at its own frequency (base {base:g}, "
        f"training length {length:,}). For longer sequences, the scalings lower some of these frequencies. At 1 a "
        "pair rotates as it was trained. Right of the marked line, pairs never complete a rotation within the "
        "training length: in a longer sequence they reach angles that were never seen. A dropped model has no "
        "rotation."
    )
    return [element("p", words), run_charts.frequency_charts(results.run, factors, *rotation)]


# ---------------------------------------------------------------------------------------------------------------------
# A suite that is asked with prompts


FEW = 4  # charts that are not folded away


def suite_parts(
    suite: str,
    tables: Sequence[Table],
    styles: Mapping[str, Style],
    level: int,
    training_length: int | None = None,
    charts: bool = True,
) -> list[object]:
    """All of a suite, below a heading of `level`; nothing without a score. Without `charts`, the tables alone."""
    tables = [table for table in tables if table.cells]
    if not tables:
        return []
    parts: list[object] = [element(f"h{level}", suite_title(suite))]
    if suite in ABOUT:
        parts.append(element("p", ABOUT[suite], class_="soft"))
    columns = columns_of(tables)
    if suite == "lm_eval":
        return [*parts, *(harness_table(measured_at(tables, column), column, styles) for column in columns)]
    first = tables[0] if len(tables) == 1 else averages(tables, AVERAGED)
    if first and len(first.columns) > 1:
        chart = score_chart(first, styles, table_title(first), bars=True) if charts else None
        parts.append(element("div", score_table(first, styles, True), chart, class_="grid below"))
    if len(tables) > 1 or len(columns) == 1:
        drawn = [task_table(measured_at(tables, column), column, styles) for column in reversed(columns)]
        parts.append(element("div", drawn[0], class_="below"))
        others = [element("div", table, class_="below") for table in drawn[1:]]
        parts.append(folded(f"{suite_title(suite)} at the other lengths", others))
    if not charts:
        return parts
    size, look = ("half", "grid") if len(tables) <= FEW else ("third", "grid thirds")
    by_task = tables if len(tables) > 1 else []
    lines = [score_chart(table, styles, table_title(table), bars=True, size=size) for table in by_task]
    buckets = [_by_sequence_length(table, styles, training_length) for table in tables]
    for title, found, grid in (
        ("By length, task by task", lines, look),
        ("By the length of the sequence, task by task", buckets, "grid"),
    ):
        if shown := [one for one in found if one]:
            parts.append(folded(title, element("div", shown, class_=grid), unfolded=len(shown) <= FEW))
    return parts


def _by_sequence_length(table: Table, styles: Mapping[str, Style], training_length: int | None) -> Markup:
    """A task's scores by the length of its sequences, as a table and a chart."""
    found = by_sequence_length(table, training_length)
    if found is None:
        return Markup("")
    unit = next(
        (str(of) for c in found.cells.values() if (of := as_dict(c.record.get("by_length")).get("of"))), "tokens"
    )
    ticks = [float(column.key) for column in found.columns]
    x = PlotAxis(f"{unit} of the sequence (log scale)", True, _tokens_text, ticks)
    chart = score_chart(found, styles, f"{task_name(found)} by the length of the sequence", x, bars=True)
    return element("div", score_table(found, styles, True), element("div", chart, class_="below"))


def _tokens_text(tokens: float) -> str:
    """4096 as 4K, 5000 as 5,000."""
    return f"{tokens / 1024:.0f}K" if tokens % 1024 == 0 else f"{tokens:,.0f}"


# ---------------------------------------------------------------------------------------------------------------------
# Analyses


def analysis_title(directory: str, name: str) -> str:
    """The title of an analysis: its name in words, and that of its directory if it has another."""
    words = name.replace("_", " ").strip().capitalize() or "Analysis"
    return words if directory == name else f"{words} ({directory})"


def analysis_parts(run: RunFiles) -> list[tuple[str, list[object]]]:
    """(title, parts of the section) of each analysis of a run."""
    return [
        (analysis_title(directory, analysis.name), _parts(run, analysis))
        for directory, analysis in run.analyses.items()
    ]


def _parts(run: RunFiles, analysis: Any) -> list[object]:
    """Sentences, tables and figures, and folded how they were made. `analysis` is a `findings.Written`."""
    found, former = analysis.findings, former_models(run, analysis.about)
    sentences = [element("li", sentence) for sentence in found.sentences]
    figures = [analysis_maps(one) if isinstance(one, HeatMaps) else line_charts(one) for one in found.figures]
    return [
        note(former) if former else None,
        element("ul", sentences, class_="points") if sentences else None,
        [_table(table) for table in found.tables],
        figures,
        folded("How this was made", _about(analysis.about), _arrays(found.shapes)),
    ]


def _table(table: Any) -> Markup:
    """A `TextTable` below its title."""
    inner = plain_table(table.title, table.header, table.rows, words=table.header[: table.words])
    return element("div", element("p", table.title, class_="title"), inner, class_="below")


def _about(about: object) -> Markup:
    """Every key of an analysis's record of how it was made; commands and nested values in lines of their own."""
    known = {str(key): _shown(key, value) for key, value in about.items()} if isinstance(about, Mapping) else {}
    parts: list[object] = []
    if command := known.pop("command", None):
        parts = [element("p", "To make it again:", class_="title"), element("pre", command, class_="command")]
    items = [(key.replace("_", " ").capitalize(), value) for key, value in known.items() if value]
    return text([*parts, pairs(items) if items else None])


def _shown(key: object, value: object) -> object:
    """A value of `about` for people: numbers with units where the key has one, short mappings in a line."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return duration(value) if key == "seconds" and value >= 1 else axis_number(value)
    if isinstance(value, str) or value is None:
        return value
    if isinstance(value, Mapping) and not any(isinstance(item, Mapping | Sequence) and not isinstance(item, str)
                                              for item in value.values()):  # fmt: skip
        return ", ".join(f"{name} {item}" for name, item in value.items())
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(map(str, value))
    return folded("Show", element("pre", json.dumps(value, indent=1, ensure_ascii=False, default=str)))


def _arrays(shapes: object) -> Markup:
    """The arrays of `analysis.npz` and what their axes are."""
    if not isinstance(shapes, Mapping) or not shapes:
        return Markup("")
    rows = [[element("code", f"numbers/{name}"), shape] for name, shape in shapes.items()]
    title = element("p", "The arrays in analysis.npz", class_="title below")
    return text([title, plain_table("Arrays in analysis.npz", ("Array", "Axes"), rows)])
