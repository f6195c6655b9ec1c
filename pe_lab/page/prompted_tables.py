"""Tables and charts of the suites that ask with prompts (needles in a haystack, RULER, LongBench ...): method by task,
averages, scores by length and by the length of a task's own texts."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from pe_lab.analysis.run_files import Row, as_dict, as_list, number
from pe_lab.analysis.scores import Z95, Bucket, Cell, Column, Table, is_prompted, share_cell
from pe_lab.analysis.variants import Style, is_dropped, order
from pe_lab.page.charts import Axis, Mark, Series, line_chart
from pe_lab.page.markup import Markup, element
from pe_lab.page.result_tables import heat, measured, score_cell, score_table, scroll, suite_title, swatch, task_title
from pe_lab.results.formatting import count, percent, short_number, times

ORDER = ("niah", "ruler", "longbench", "many_shot", "lm_eval")
AVERAGED = {"ruler": 13, "longbench": 21, "lm_eval": None}  # suites whose tasks are averaged -> how many there are
FEW = 4  # drawings in a row that stay in sight
ABOUT = {
    "niah": "Facts are hidden in a long text, and the model is asked for them. The figure is the share of the values "
    "asked for that its answer contains; “all” is the share of prompts whose every value was found.",
    "ruler": "Tasks made for long context: needles of many kinds, variables to trace, words to count, questions about "
    "documents, among others.",
    "longbench": "Questions, summaries and code about real documents, each as long as it is. Those that were too "
    "long for the model lost their middle; pointing at a figure tells how many.",
    "many_shot": "A task explained by examples alone, as many as the length holds.",
    "lm_eval": "Scores as EleutherAI's lm-evaluation-harness computes them, ± its own standard errors.",
}


def is_task_table(table: Table) -> bool:
    """Whether a table is of one task of a suite that asks with prompts."""
    return any(is_prompted(cell.row) for cell in table.cells.values())


def task_suites(names: Collection[str]) -> list[str]:
    """Suites in the order of the page."""
    return sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def task_name(table: Table) -> str:
    """A task for people."""
    return table.source.replace("_", " ")


def metric_name(table: Table) -> str:
    """What a task is scored by: `fraction found`."""
    metric = next((str(cell.row["metric"]) for cell in table.cells.values() if is_prompted(cell.row)), "")
    return metric.replace("_", " ")


def columns_of(tables: Sequence[Table]) -> list[Column]:
    """The lengths of several tasks, each once, shortest first; texts of their own lengths before all."""
    found = {column.key: column for table in tables for column in table.columns}
    return [found[key] for key in sorted(found)]


def labels_of(tables: Sequence[Table]) -> dict[str, Row]:
    """The methods of several tasks, in the order of tables."""
    found: dict[str, Row] = {}
    for table in tables:
        found |= {label: row for label, row in table.rows.items() if label not in found}
    return dict(sorted(found.items(), key=lambda item: order(*item)))


def averages(tables: Sequence[Table]) -> Table | None:
    """The mean over tasks by method and length, where a method has all tasks (without those that are no shares of 1);
    None for suites that are not averaged."""
    tables = [table for table in tables if all(cell.share for cell in table.cells.values())]
    if len(tables) < 2 or (suite := tables[0].suite) not in AVERAGED:
        return None
    columns, rows, cells = columns_of(tables), labels_of(tables), {}
    for label in rows:
        for column in columns:
            found = [cell for table in tables if (cell := table.cell(label, column))]
            if len(found) == len(tables):
                cells[label, column.key] = mean(found)
    if not cells:
        return None
    rows = {label: row for label, row in rows.items() if any(label == known for known, _ in cells)}
    columns = [column for column in columns if any(key == column.key for _, key in cells)]
    n, of = len(tables), AVERAGED[suite] or 0
    name = "average" if n == of else f"mean of {n} of {of} tasks" if n < of else f"mean of {n} tasks"
    return Table(suite, name, tuple(columns), rows, cells, True)


def mean(found: Sequence[Cell]) -> Cell:
    """The mean of the same method's scores on different tasks: their errors are independent."""
    value = sum(cell.value for cell in found) / len(found)
    errors = [cell.stderr for cell in found]
    stderr = None if None in errors else math.hypot(*errors) / len(found)
    return share_cell(value, stderr, {**found[0].row, "scores": {}, "samples": samples(found), "truncated": None})


def samples(found: Sequence[Cell]) -> float:
    """Answers behind several cells."""
    return sum(number(cell.row, "samples") or 0.0 for cell in found)


def suite_parts(
    suite: str,
    tables: Sequence[Table],
    styles: Mapping[str, Style],
    level: int,
    training_length: int | None = None,
    charts: bool = True,
) -> list[object]:
    """All of a suite, below a heading of `level`; nothing without a figure. Without `charts`, the tables alone."""
    tables = [table for table in tables if table.cells]
    if not tables:
        return []
    parts: list[object] = [element(f"h{level}", suite_title(suite))]
    if suite in ABOUT:
        parts.append(element("p", ABOUT[suite], class_="soft"))
    columns = columns_of(tables)
    if suite == "lm_eval":
        return [*parts, *(harness_table(measured_at(tables, column), column, styles) for column in columns)]
    average = averages(tables)
    first = tables[0] if len(tables) == 1 else average
    if first and len(first.columns) > 1:
        pair = [score_table(first, styles, True), score_chart(first, styles) if charts else None]
        parts.append(element("div", pair, class_="grid below"))
    if len(tables) > 1 or len(columns) == 1:
        drawn = [task_table(measured_at(tables, column), column, styles) for column in reversed(columns)]
        parts.append(element("div", drawn[0], class_="below"))
        summary = element("summary", f"{suite_title(suite)} at the other lengths")
        others = [element("div", table, class_="below") for table in drawn[1:]]
        parts.append(element("details", summary, others) if others else None)
    if not charts:
        return parts
    size, look = ("half", "grid") if len(tables) <= FEW else ("third", "grid thirds")
    lines = [chart for table in tables if (chart := score_chart(table, styles, size))] if len(tables) > 1 else []
    parts += gathered("By length, task by task", lines, look)
    buckets = [bucketed for table in tables if (bucketed := bucket_parts(table, styles, training_length))]
    return [*parts, *gathered("By the length of the text, task by task", buckets)]


def gathered(title: str, drawn: Sequence[Markup], look: str = "grid") -> list[Markup]:
    """Drawings in a grid behind a title, in sight while they are few."""
    if not drawn:
        return []
    grid = element("div", list(drawn), class_=look)
    return [element("details", element("summary", title), grid, open=len(drawn) <= FEW)]


def measured_at(tables: Sequence[Table], column: Column) -> list[Table]:
    """The tasks that were measured at a length."""
    return [table for table in tables if any(key == column.key for _, key in table.cells)]


def at_words(column: Column) -> str:
    """` at 8× (16,384 tokens)`; nothing for texts of their own lengths."""
    if column.factor is None and column.length is None:
        return ""
    return f" at {column.title}" + (f" ({column.small} tokens)" if column.small else "")


def task_table(tables: Sequence[Table], column: Column, styles: Mapping[str, Style]) -> Markup:
    """Method by task at one length: the mean of all tasks first, the best of each task marked."""
    suite, metrics = tables[0].suite, {metric_name(table) for table in tables}
    average = averages(tables)
    average = average if average and measured_at([average], column) else None
    head = [element("th", "Method", scope="col")]
    if average:
        title, *of = average.source.split(" of ", maxsplit=1)
        small = element("small", f"of {of[0]}") if of else None
        head.append(element("th", title, small, scope="col", class_="average"))
    for table in tables:
        small = element("small", metric_name(table)) if len(metrics) > 1 else None
        head.append(element("th", task_name(table), small, scope="col"))
    shown = [*([average] if average else []), *tables]
    best = [table.best(column) for table in shown]
    body = []
    for label, row in labels_of(tables).items():
        if not any(table.cell(label, column) for table in tables):
            continue
        cells = [element("th", swatch(styles.get(label)), label, scope="row")]
        cells += [score_cell(t, label, column, *found, framed=False) for t, found in zip(shown, best, strict=True)]
        body.append(element("tr", cells, class_="ours" if is_dropped(row) else None))
    name = f"{suite_title(suite)}{at_words(column)}"
    inner = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", body),
        class_="scores tasks",
        aria_label=f"{name}: each method on each task",
    )
    what = element("small", f" ({metrics.pop()})") if len(metrics) == 1 else None
    return element("div", element("p", name, what, class_="title"), scroll(inner, name, "scroll fit"))


def harness_table(tables: Sequence[Table], column: Column, styles: Mapping[str, Style]) -> Markup:
    """Task by method, as the harness prints it: scores with its standard errors, the best of each task marked."""
    labels = labels_of(tables)
    head = [element("th", "Task", scope="col")]
    head += [element("th", swatch(styles.get(label)), label, scope="col") for label in labels]
    average = averages(tables)
    body = []
    for table in [*tables, *([average] if average else [])]:
        winner, ties = table.best(column)
        direction = "" if table is average else f"{metric_name(table)} {'↑' if table.higher_is_better else '↓'}"
        cells = [element("th", task_name(table), element("small", direction), scope="row")]
        for label in labels:
            cell = table.cell(label, column)
            if cell is None:
                cells.append(element("td", element("span", "–", aria_label="not measured")))
                continue
            flag, value = "", element("span", cell.shown)
            if label == winner:
                flag, value = element("i", "●", class_="flag", aria_label="best:"), element("b", cell.shown)
            elif label in ties:
                flag = element("i", "○", class_="flag", aria_label="not distinguishable from the best:")
            stderr = cell.stderr if table is average else number(cell.row, "stderr")
            error = element("small", f"±{error_text(stderr, cell)}") if stderr is not None else None
            look, title = f"--heat:{heat(table, column, cell):.2f}", measured(label, column, cell)
            cells.append(element("td", flag, value, error, title=title, style=look))
        body.append(element("tr", cells, class_="average" if table is average else None))
    name = f"{suite_title('lm_eval')}{at_words(column)}"
    inner = element(
        "table",
        element("thead", element("tr", head)),
        element("tbody", body),
        class_="scores harness",
        aria_label=f"{name}: each task under each method",
    )
    return element("div", element("p", name, class_="title"), scroll(inner, name, "scroll fit"), class_="below")


def error_text(stderr: float, cell: Cell) -> str:
    """A standard error in the unit of its score."""
    return f"{100 * stderr:.1f}" if cell.share else short_number(stderr)


def score_chart(table: Table, styles: Mapping[str, Style], size: str = "half") -> Markup:
    """A task's scores against length, a bar of 95% at each; nothing for fewer than two lengths."""
    keys = [column.key for column in table.columns]
    shares = all(cell.share for cell in table.cells.values())
    if len(keys) < 2 or min(keys) <= 0 or not shares:
        return Markup("")
    multiples = all(column.factor is not None for column in table.columns)
    x = Axis("text length / training length" if multiples else "tokens", True, times if multiples else count, keys)
    marks = [Mark(1.0, "trained")] if multiples and min(keys) < 1 < max(keys) else []
    return chart_of(table, styles, task_title(table), x, marks, size)


def chart_of(
    table: Table, styles: Mapping[str, Style], title: str, x: Axis, marks: Sequence[Mark] = (), size: str = "half"
) -> Markup:
    """Shares of 1 by column, with error bars; a bucket stands at the (geometric) middle of its lengths."""
    series, top = [], 0.1
    for label in table.rows:
        style = styles.get(label, Style("ink"))
        points, bars = [], []
        for column in table.columns:
            cell = table.cell(label, column)
            if cell is None:
                continue
            at, (low, high) = place(column), cell.ends or (cell.value, cell.value)
            top = max(top, high)
            points.append((at, cell.value))
            bars.append(Series(label, [(at, low), (at, high)], Style(style.colour), faint=True))
        series += [*bars, Series(label, points, style, markers=True)]
    y = Axis("score", show=percent, domain=(0.0, min(1.0, 1.04 * top)))
    return line_chart(title, series, x, y, marks, "Thin bars: 95% intervals.", size)


def place(column: Column) -> float:
    """Where a column stands on an axis."""
    if isinstance(column, Bucket):
        return math.sqrt(max(column.start, (column.length or 1) / 2) * (column.length or 1))
    return column.key


def bucket_table(table: Table, training_length: int | None = None) -> Table | None:
    """A task's scores by the length of the text, from the rows' `by_length`; None where no row has any."""
    columns: dict[float, Column] = {}
    cells: dict[tuple[str, float], Cell] = {}
    for (label, _), cell in table.cells.items():
        found = as_dict(cell.row.get("by_length"))
        edges, scores = as_list(found.get("edges")), as_list(found.get("score"))
        ends = [number({"edge": edge}, "edge") for edge in edges]
        if len(edges) != len(scores) + 1 or None in ends:
            continue
        lists = {key: as_list(found.get(key)) for key in ("score", "low", "high", "count")}
        multiples_of = training_length if found.get("of", "tokens") == "tokens" else None
        for index, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            here = {key: values[index] for key, values in lists.items() if len(values) == len(scores)}
            score, low, high = (number(here, key) for key in ("score", "low", "high"))
            if score is None or not 0 <= score <= 1 or number(here, "count") == 0:
                continue
            column = Bucket(None, int(end), int(start), in_training_lengths(start, end, multiples_of))
            columns[column.key] = column
            ends = (low, high) if low is not None and high is not None else None
            row = {**cell.row, "scores": {}, "samples": here.get("count"), "truncated": None}
            cells[label, column.key] = share_cell(score, (ends[1] - ends[0]) / (2 * Z95) if ends else None, row, ends)
    if not cells:
        return None
    rows = {label: row for label, row in table.rows.items() if any(label == known for known, _ in cells)}
    ordered = tuple(column for _, column in sorted(columns.items()))
    return Table(table.suite, table.source, ordered, rows, cells, True)


def in_training_lengths(start: float, end: float, training_length: int | None) -> str:
    """`2–4×`; nothing where the training length is not known."""
    return f"{start / training_length:.3g}–{end / training_length:.3g}×" if training_length else ""


def tokens_text(tokens: float) -> str:
    """4096 as 4K, 5000 as 5,000."""
    return f"{tokens / 1024:.0f}K" if tokens % 1024 == 0 else f"{tokens:,.0f}"


def bucket_parts(table: Table, styles: Mapping[str, Style], training_length: int | None) -> Markup:
    """A task's scores by the length of its texts, as a table and a small chart."""
    found = bucket_table(table, training_length)
    if found is None:
        return Markup("")
    unit = next((str(of) for c in found.cells.values() if (of := as_dict(c.row.get("by_length")).get("of"))), "tokens")
    x = Axis(f"{unit} of the text (log scale)", True, tokens_text, [float(column.key) for column in found.columns])
    chart = chart_of(found, styles, f"{task_name(found)} by the length of the text", x)
    return element("div", score_table(found, styles, True), element("div", chart, class_="below"))
