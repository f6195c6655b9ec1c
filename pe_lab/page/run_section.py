"""One run's part of the report, section by section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pe_lab.analysis.run_files import Row, Run
from pe_lab.analysis.scores import Column, Table, measure, tables
from pe_lab.analysis.variants import Style, assign_styles, is_dropped, is_rotary
from pe_lab.analysis.verdict import Verdict, judge
from pe_lab.page import result_tables, run_charts, run_facts
from pe_lab.page.heat_maps import heat_map_figures, legend
from pe_lab.page.markup import Markup, element, text
from pe_lab.page.prompted_tables import is_task_table, suite_parts, task_suites
from pe_lab.results.formatting import listing

SCORED = ("needles", "perplexity")  # the suites a verdict is made of, the first one first


STORY = (
    "A language model was trained with RoPE, a rotary positional encoding. Then the encoding was removed "
    "(the “dropped” "
    "model, DroPE) and the model trained on for a little while, on texts of the same length. This page "
    "measures what "
    "each way of reading makes of texts longer than any the model was trained on."
)


@dataclass(frozen=True)
class Results:
    """A run with its evaluation worked out: the tables of each suite, the verdict, a look for each method."""

    run: Run
    tables: dict[str, list[Table]]
    verdict: Verdict
    styles: Mapping[str, Style]

    @property
    def all_tables(self) -> list[Table]:
        return [table for found in self.tables.values() for table in found]

    @property
    def task_tables(self) -> dict[str, list[Table]]:
        """The tables of suites that ask with prompts, one a task, in the page's order."""
        asked = {suite: [t for t in self.tables[suite] if is_task_table(t)] for suite in task_suites(self.tables)}
        return {suite: found for suite, found in asked.items() if found}


def work_out(run: Run) -> Results:
    """Tables, verdict and looks of a run."""
    suites = [*SCORED, *sorted(set(run.evaluation) - set(SCORED) - {"beta"})]
    found = {suite: tables(run, suite) for suite in suites}
    first = [found[suite][0] if found[suite] else None for suite in SCORED]
    labels: dict[str, Row] = {}
    for table in (table for suite in found.values() for table in suite):
        labels |= {label: row for label, row in table.rows.items() if label not in labels}
    results = Results(run, found, judge(*first), assign_styles(labels))
    if results.task_tables and not any(table and table.cells for table in first):
        asked = listing([result_tables.suite_title(suite) for suite in results.task_tables])
        words = f"Measured here: {asked}. Perplexity and symbolic needles, which a verdict is made of, were not."
        return replace(results, verdict=Verdict(words, "missing"))
    return results


def section(level: int, title: str, identity: str, *children: object) -> Markup:
    """A section with its heading; nothing if it would be empty."""
    body = text(list(children))
    return element("section", element(f"h{level}", title, id=identity), body) if body else Markup("")


def top(results: Results, level: int) -> Markup:
    """The verdict of a run, its duels and its key facts. At level 1 its first sentence is the page's title."""
    verdict = results.verdict
    sentences = [sentence for sentence in (verdict.opening, verdict.headline) if sentence]
    title, *more = sentences if level == 1 else [None, *sentences]
    return element(
        "div",
        element("h1", title, class_="long" if len(title) > 180 else None) if title else None,
        [element("p", sentence, class_="lede") for sentence in more],
        element("p", STORY, class_="soft") if level == 1 and tells_of_dropping(results) else None,
        element("ul", [element("li", sentence) for sentence in verdict.details], class_="points")
        if verdict.details
        else None,
        missing_evaluation(results) if verdict.tone == "missing" else None,
        result_tables.duel_board(verdict.duels),
        run_facts.key_facts(results.run),
    )


def tells_of_dropping(results: Results) -> bool:
    """Whether RoPE and a dropped model were both measured, so that the usual story is this run's."""
    rows = [row for table in results.all_tables for row in table.rows.values()]
    return any(is_dropped(row) for row in rows) and any(is_rotary(row) for row in rows)


def missing_evaluation(results: Results) -> Markup | None:
    """What to do where there is nothing to compare."""
    run = results.run
    if results.all_tables:
        return None
    unfinished = [phase.name for phase in run.phases if phase.running]
    state = f"Training is not complete (phase {unfinished[-1]}). " if unfinished else ""
    command = f"python -m pe_lab.evaluate --from={run.directory}"
    return element("div", element("p", state, "To measure it: ", element("code", command)), class_="note")


def run_sections(results: Results, level: int, prefix: str) -> list[Markup]:
    """All sections of a run below its verdict, with headings of `level`."""
    run = results.run
    problems = None
    if run.problems:
        problems = element(
            "div",
            element("p", "Some files were missing or incomplete:"),
            element("ul", [element("li", problem) for problem in run.problems]),
            class_="note",
        )
    return [
        text(problems),
        section(level, "Reading past the training length", f"{prefix}results", *result_parts(results)),
        section(level, "Needles by depth and length", f"{prefix}depth", *depth_parts(results, level + 1)),
        section(level, "Tasks asked in prompts", f"{prefix}tasks", *task_parts(results, level + 1)),
        section(level, "Where in the text", f"{prefix}position", *position_parts(results)),
        section(level, "Training", f"{prefix}training", *training_parts(results)),
        section(level, "How the frequencies are stretched", f"{prefix}frequencies", *frequency_parts(results)),
        section(level, "What was run", f"{prefix}run", run_facts.what_was_run(run)),
        section(level, "What to keep in mind", f"{prefix}caveats", caveat_list(run)),
    ]


def caveat_list(run: Run) -> Markup:
    """Caveats as a list."""
    found = run_facts.caveats(run)
    return element("ul", [element("li", sentence) for sentence in found]) if found else Markup("")


def result_parts(results: Results) -> list[object]:
    """Tables and their charts: the two main ones side by side, then whatever else was measured."""
    main = [results.tables[suite][0] for suite in SCORED if results.tables[suite]]
    rest = [table for table in results.all_tables if table not in main and table.cells and not is_task_table(table)]
    if not main and not rest and not (set(results.run.evaluation) - set(results.task_tables)):
        return []
    parts: list[object] = []
    if main:
        several = len(results.tables["perplexity"]) > 1
        parts += [
            element(
                "p",
                "Rows are ways of reading, columns are text lengths. ● marks the best of a column, ○ what "
                "cannot be told "
                "from it; the small figures are 95% intervals; deeper green is better.",
                class_="soft",
            ),
            run_facts.mixture_note(results.run),
            element("div", [result_tables.score_table(t, results.styles, several) for t in main], class_="grid"),
            element(
                "div",
                [run_charts.length_chart(t, results.styles) for t in main],
                class_="grid",
                style="margin-top:22px",
            ),
        ]
    if rest:
        parts.append(
            element(
                "div",
                [result_tables.score_table(t, results.styles, True) for t in rest],
                class_="grid",
                style="margin-top:28px",
            )
        )
    unknown = {
        suite: rows
        for suite, rows in results.run.evaluation.items()
        if suite not in (*SCORED, "beta") and not any(measure(row) for row in rows)
    }
    parts += [result_tables.rows_table(suite, rows) for suite, rows in sorted(unknown.items())]
    if results.run.evaluation.get("beta"):
        parts += [
            element(
                "p",
                "The fitted logit scale β ",
                element("small", "(losses in nats per token)"),
                class_="title",
                style="margin-top:28px",
            ),
            result_tables.beta_table(results.run.evaluation["beta"]),
        ]
    measured = [table for table in results.all_tables if not is_task_table(table)]
    parts.append(weights(measured) if measured else None)
    return parts


def weights(measured: list[Table]) -> Markup:
    """Which checkpoints are behind the rows of some tables, folded."""
    summary = element("summary", "Weights behind each row")
    return element("details", summary, result_tables.weights_table(measured))


def depth_parts(results: Results, level: int) -> list[object]:
    """Heat maps of every task with needles."""
    parts: list[object] = []
    for found in (results.tables["needles"][:1], *results.task_tables.values()):
        parts += heat_map_figures(found, results.styles, level)
    words = (
        "Each cell is the per cent of needles found at one depth of texts of one length: 0% is the beginning of the "
        "text, 100% its end, next to the question. A way of reading that carries over to longer texts is as "
        "deep a green on the right as at the training length."
    )
    return [element("p", words, class_="soft"), legend(), *parts] if parts else []


def task_parts(results: Results, level: int) -> list[object]:
    """Every suite that asks with prompts."""
    parts: list[object] = []
    for suite, found in results.task_tables.items():
        parts += suite_parts(suite, found, results.styles, level, results.run.training_length)
    if not parts:
        return []
    words = (
        "Prompts are put to the model, and its answers are scored. ● marks the best of a task, ○ what cannot be told "
        "from it; the small figures are 95% intervals."
    )
    measured = [table for found in results.task_tables.values() for table in found]
    return [element("p", words, class_="soft"), *parts, weights(measured)]


def position_parts(results: Results) -> list[object]:
    """Curves by position and by distance: the longest texts in full, shorter ones folded."""
    parts: list[object] = []
    draws = {"perplexity": run_charts.position_chart, "needles": run_charts.distance_chart}
    captions = {
        "perplexity": "Each curve is the perplexity of tokens at that place in the text, averaged over "
        "texts. A model "
        "that uses long context goes on falling to the right; one that breaks rises where the training "
        "length ends.",
        "needles": "A needle's question may come soon after the fact or long after. Right of the marked "
        "line the "
        "distance itself is longer than any the model was trained on.",
    }
    for suite, chart in draws.items():
        for table in results.tables[suite][:1]:
            columns = [column for column in reversed(table.columns) if drawn(chart, results, table, column, "half")]
            if not columns:
                continue
            parts.append(drawn(chart, results, table, columns[0], "wide", captions[suite]))
            others = [drawn(chart, results, table, column, "half") for column in columns[1:]]
            if others:
                summary = f"{result_tables.suite_title(suite)} at the other lengths"
                parts.append(element("details", element("summary", summary), element("div", others, class_="grid")))
    return parts


def drawn(chart, results: Results, table: Table, column: Column, size: str, caption: str = "") -> Markup:
    """One chart of one length."""
    return chart(results.run, table, column, results.styles, size, caption)


def training_parts(results: Results) -> list[object]:
    """Lineage and losses."""
    run = results.run
    chart = run_charts.loss_chart(run)
    if not run.phases:
        return [element("p", "No phase of training was found in this directory.", class_="soft")]
    nothing = None if chart else element("p", "No losses have been logged yet.", class_="soft")
    return [run_facts.lineage_diagram(run), chart, nothing, run_charts.source_losses(run)]


def frequency_parts(results: Results) -> list[object]:
    """The scalings at the factors that were evaluated."""
    factors = sorted({c.factor for table in results.all_tables for c in table.columns if c.factor})
    charts = run_charts.frequency_charts(results.run, factors)
    if not charts:
        return []
    base, head_dim, length = run_charts.rotation_of(results.run) or (0.0, 0, 0)
    words = (
        f"RoPE turns each of the {head_dim // 2} pairs of channels of a head at its own speed (base "
        f"{base:g}, training "
        f"length {length:,}). To read a longer text, the scalings slow some of these pairs down. At 1 a "
        f"pair turns as "
        "it was trained; right of the marked line, pairs never complete a turn within the training length, "
        "so that in a "
        "longer text they reach angles that were never seen. A dropped model has no rotation left to go "
        "wrong."
    )
    return [element("p", words), charts]
