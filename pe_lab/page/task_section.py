"""The section of one suite that is asked with prompts: its tables, averages, and charts by length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pe_lab.evaluation.tasks.suites import AVERAGED
from pe_lab.page.charts import Axis
from pe_lab.page.markup import Markup, element, folded
from pe_lab.page.score_charts import score_chart
from pe_lab.page.suites import ABOUT, suite_title, table_title, task_name
from pe_lab.page.tables import harness_table, measured_at, score_table, task_table
from pe_lab.page.variants import Style
from pe_lab.results.records import as_dict
from pe_lab.results.table import Table
from pe_lab.results.scores import averages, by_sequence_length, columns_of

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
    x = Axis(f"{unit} of the sequence (log scale)", True, _tokens_text, ticks)
    chart = score_chart(found, styles, f"{task_name(found)} by the length of the sequence", x, bars=True)
    return element("div", score_table(found, styles, True), element("div", chart, class_="below"))


def _tokens_text(tokens: float) -> str:
    """4096 as 4K, 5000 as 5,000."""
    return f"{tokens / 1024:.0f}K" if tokens % 1024 == 0 else f"{tokens:,.0f}"
