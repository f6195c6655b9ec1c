"""Charts of scores: by length, by tokens trained, by position in the sequence, and by a needle's distance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pe_lab.analysis.runs import Run
from pe_lab.analysis.scores import Bucket
from pe_lab.page.charts import Axis, Point, Series, line_chart
from pe_lab.page.markup import Markup
from pe_lab.page.suites import SCORED, suite_title, task_name
from pe_lab.page.variants import INK, Style
from pe_lab.results.formatting import count, percent, times
from pe_lab.results.intervals import exp
from pe_lab.results.records import Record, as_dict, bins
from pe_lab.results.scores import Cell, Column, Table


def score_chart(
    scores: Table,
    styles: Mapping[str, Style],
    title: str,
    x: Axis | None = None,
    bars: bool = False,
    size: str = "half",
) -> Markup:
    """A table's values against length; "" for fewer than two lengths.

    A table of buckets or of training tokens has an axis `x` of its own. With `bars`, 95% intervals are drawn, and only
    shares of 1.
    """
    keys = [column.key for column in scores.columns]
    cells = list(scores.cells.values())
    if (x is None and (len(keys) < 2 or min(keys) <= 0)) or (bars and not all(cell.share for cell in cells)):
        return Markup("")
    multiples = all(column.factor is not None for column in scores.columns)
    marks = [(1.0, "trained")] if multiples and 1.0 in keys and min(keys) < 1 else []
    if x is None:
        name = "sequence length / training length" if multiples else "tokens"
        x = Axis(name, True, times if multiples else count, keys)
    series = []
    for label in scores.variants:
        style = styles.get(label, INK)
        found = [(_place(column), cell) for column in scores.columns if (cell := scores.cell(label, column))]
        if bars:
            ends = [(at, cell.ends or (cell.value, cell.value)) for at, cell in found]
            faint = Style(style.colour)
            series += [Series(label, [(at, low), (at, high)], faint, faint=True) for at, (low, high) in ends]
        series.append(Series(label, [(at, cell.value) for at, cell in found], style, markers=True))
    y = _value_axis(scores.suite, cells, bars)
    return line_chart(title, series, x, y, marks, "Thin bars: 95% intervals." if bars else "", size)


def _place(column: Column) -> float:
    """A column's place on the axis of lengths; a bucket's is the geometric middle."""
    if isinstance(column, Bucket):
        end = column.length or 1
        return math.sqrt(max(column.start, end / 2) * end)
    return column.key


def _value_axis(suite: str, cells: Sequence[Cell], bars: bool = False) -> Axis:
    """The axis of a suite's values: shares from 0, perplexities logarithmic."""
    if bars:
        top = 1.04 * max([0.1, *((cell.ends or (0.0, cell.value))[1] for cell in cells)])
        return Axis("score", show=percent, domain=(0.0, min(1.0, top)))
    if any(cell.share for cell in cells):
        name = "accuracy" if suite == "needles" else "score"
        return _share_axis(name, [cell.value for cell in cells])
    return Axis("perplexity (log scale)", True) if suite == "perplexity" else Axis("score")


def _share_axis(name: str, values: Sequence[float]) -> Axis:
    return Axis(name, show=percent, domain=(0.0, min(1.0, max(1.12 * max(values, default=1.0), 0.1))))


def history_chart(phase: str, column: Column, scores: Table, styles: Mapping[str, Style]) -> Markup:
    """The scores of a phase's checkpoints against the tokens that they were trained on (DroPE's Figure 10)."""
    task = task_name(scores)
    name = suite_title(scores.suite) + (f", {task}" if task and scores.suite not in SCORED else "")
    where = length_words(column)
    title = f"{name} by tokens trained in {phase}" + (f", sequences of {where}" if where else "")
    return score_chart(scores, styles, title, Axis("tokens trained", show=count))


def position_chart(
    run: Run, scores: Table, column: Column, styles: Mapping[str, Style], size: str, caption: str = ""
) -> Markup:
    """Scores inside the sequences of one length, with a mark at the training length.

    Perplexity by the position of a token, or needle accuracy by the distance between a fact and its question.
    """
    series = []
    for label, cell in scores.column(column).items():
        if scores.suite == "needles":
            points = _points(as_dict(cell.record.get("accuracy_by_distance")), "edges", "accuracy")
        else:
            losses = _points(cell.record, "position_edges", "nll_by_position")
            points = [(x, exp(min(y, 50.0))) for x, y in losses]
        series.append(Series(label, points, styles.get(label, INK), markers=scores.suite == "needles"))
    if scores.suite == "needles":
        title, name = "Needle accuracy by distance", "tokens from fact to question (log scale)"
        y = _share_axis("accuracy", [y for one in series for _, y in one.points])
    else:
        title, name = "Perplexity by position", "position in the sequence (tokens, log scale)"
        y = Axis("perplexity (log scale)", True)
    xs = [x for one in series for x, _ in one.points if x > 0]
    ticks = None
    if xs:
        ticks = [2.0**e for e in range(math.floor(math.log2(min(xs))), math.ceil(math.log2(max(xs))) + 1)]
        ticks = ticks[:: max(1, math.ceil(len(ticks) / 11))]
    trained = float(run.training_length or 0)
    marks = [(trained, "training length")] if xs and min(xs) <= trained <= max(xs) else []
    x = Axis(name, True, lambda value: f"{value:,.0f}", ticks)
    return line_chart(f"{title}, sequences of {length_words(column)}", series, x, y, marks, caption, size)


def _points(found: Record, edges: str, value: str) -> list[Point]:
    """(middle of the bin, value) of the bins in a record."""
    return [(max((part["start"] + part["end"]) / 2, 0.5), part[value]) for part in bins(found, edges, value, "count")]


def length_words(column: Column) -> str:
    """`8× the training length (512 tokens)`."""
    tokens = f"{column.length:,} tokens" if column.length else ""
    if column.factor is None:
        return tokens
    return f"{times(column.factor)} the training length" + (f" ({tokens})" if tokens else "")
