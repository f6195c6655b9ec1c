"""Charts of scores: by length, by tokens trained, by position in the sequence, and by a needle's distance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from pe_lab.page.axes import PlotAxis, Point
from pe_lab.page.charts import line_chart
from pe_lab.page.colours import INK, Style
from pe_lab.page.markup import Markup
from pe_lab.page.plot import Series
from pe_lab.page.variants import SCORED, suite_title, task_name
from pe_lab.results.formatting import count, listing, percent, times
from pe_lab.results.records import Record, as_dict, bins, number
from pe_lab.results.runs import RunFiles
from pe_lab.results.statistics import exp
from pe_lab.results.table import Bucket, Cell, Length, Table
from pe_lab.results.variants import DROPPED, kind


def score_chart(
    scores: Table,
    styles: Mapping[str, Style],
    title: str,
    x: PlotAxis | None = None,
    bars: bool = False,
    size: str = "half",
    caption: str = "",
) -> Markup:
    """A table's values against length, with bars of their 95% intervals; "" for fewer than two lengths.

    A table of buckets or of training tokens has an axis `x` of its own. With `bars`, only shares of 1 are drawn, on an
    axis that ends above the highest bar.
    """
    keys = [column.key for column in scores.columns]
    cells = list(scores.cells.values())
    if (x is None and (len(keys) < 2 or min(keys) <= 0)) or (bars and not all(cell.share for cell in cells)):
        return Markup("")
    multiples = all(column.factor is not None for column in scores.columns)
    marks = [(1.0, "trained")] if multiples and 1.0 in keys and min(keys) < 1 else []
    if x is None:
        name = "sequence length / training length" if multiples else "tokens"
        x = PlotAxis(name, True, times if multiples else count, keys)
    series = []
    for label in scores.rows:
        style = styles.get(label, INK)
        found = [(_place(column), cell) for column in scores.columns if (cell := scores.cell(label, column))]
        ends = [cell.ends or (math.nan, math.nan) for _, cell in found]
        points = [(at, cell.value) for at, cell in found]
        series.append(Series(label, points, style, markers=True, intervals=ends, bars=True))
    y = _value_axis(scores.suite, cells, bars)
    words = " ".join(filter(None, (caption, interval_words(cells))))
    return line_chart(title, series, x, y, marks, words, size, foremost(scores))


def foremost(scores: Table) -> list[str]:
    """The labels of a table in the order in which a chart shows them: dropped, RoPE, then the best at the end."""
    kinds = {kind(record): str(label) for label, record in reversed(scores.rows.items())}
    chosen = [kinds[name] for name in (*DROPPED, "RoPE") if name in kinds]
    last = scores.column(scores.columns[-1]) if scores.columns else {}
    ranked = sorted(last, key=lambda label: -last[label].score)
    return list(dict.fromkeys([*chosen[:1], *chosen[-1:], *map(str, ranked)]))


def interval_words(cells: Sequence[Cell]) -> str:
    """What the bars of a chart are: intervals over samples, or over training seeds."""
    if not any(cell.ends for cell in cells):
        return ""
    seeds = {int(number(cell.record, "seeds") or 0) for cell in cells}
    if not max(seeds, default=0):
        return "Thin bars: 95% intervals."
    words = f"Means over {listing([str(n) for n in sorted(seeds)])} seeds. Thin bars: "
    of_two = " (of two seeds their range)" if 2 in seeds else ""
    return words + ("their range." if max(seeds) == 2 else f"95% intervals of Student's t over them{of_two}.")


def _place(column: Length) -> float:
    """A column's place on the axis of lengths; a bucket's is the geometric middle."""
    if isinstance(column, Bucket):
        end = column.length or 1
        return math.sqrt(max(column.start, end / 2) * end)
    return column.key


def _value_axis(suite: str, cells: Sequence[Cell], bars: bool = False) -> PlotAxis:
    """The axis of a suite's values: shares from 0, perplexities logarithmic."""
    if bars:
        top = 1.04 * max([0.1, *((cell.ends or (0.0, cell.value))[1] for cell in cells)])
        return PlotAxis("score", show=percent, domain=(0.0, min(1.0, top)))
    if any(cell.share for cell in cells):
        name = "accuracy" if suite == "needles" else "score"
        return _share_axis(
            name, [value for cell in cells for value in (cell.value, (cell.ends or (0.0, 0.0))[1] / 1.12)]
        )
    return PlotAxis("perplexity (log scale)", True) if suite == "perplexity" else PlotAxis("score")


def _share_axis(name: str, values: Sequence[float]) -> PlotAxis:
    return PlotAxis(name, show=percent, domain=(0.0, min(1.0, max(1.12 * max(values, default=1.0), 0.1))))


def history_chart(phase: str, column: Length, scores: Table, styles: Mapping[str, Style]) -> Markup:
    """The scores of a phase's checkpoints against the tokens that they were trained on (DroPE's Figure 10)."""
    task = task_name(scores)
    name = suite_title(scores.suite) + (f", {task}" if task and scores.suite not in SCORED else "")
    where = length_words(column)
    title = f"{name} by tokens trained in {phase}" + (f", sequences of {where}" if where else "")
    return score_chart(scores, styles, title, PlotAxis("tokens trained", show=count))


def position_chart(
    run: RunFiles, scores: Table, column: Length, styles: Mapping[str, Style], size: str, caption: str = ""
) -> Markup:
    """Scores inside the sequences of one length, with a mark at the training length.

    Perplexity by the position of a token, or needle accuracy by the distance between a fact and its question.
    """
    series = []
    for label, cell in scores.column(column).items():
        if scores.suite == "needles":
            found = _points(as_dict(cell.record.get("accuracy_by_distance")), "edges", "accuracy", "low", "high")
            points, ends = [point for point, _ in found], [(max(low, 0.0), min(high, 1.0)) for _, (low, high) in found]
        else:
            names = ("position_edges", "nll_by_position", "nll_by_position_low", "nll_by_position_high")
            found = _points(cell.record, *names)
            points = [(x, exp(min(y, 50.0))) for (x, y), _ in found]
            ends = [(exp(min(low, 50.0)), exp(min(high, 50.0))) for _, (low, high) in found]
        known = any(math.isfinite(low) for low, _ in ends)  # records of one run have none
        style, dots = styles.get(label, INK), scores.suite == "needles"
        series.append(Series(label, points, style, markers=dots, intervals=ends if known else ()))
    if scores.suite == "needles":
        title, name = "Needle accuracy by distance", "tokens from fact to question (log scale)"
        highs = [high / 1.12 for one in series for _, high in one.intervals if math.isfinite(high)]
        y = _share_axis("accuracy", [*highs, *(y for one in series for _, y in one.points)])
    else:
        title, name = "Perplexity by position", "position in the sequence (tokens, log scale)"
        y = PlotAxis("perplexity (log scale)", True)
    xs = [x for one in series for x, _ in one.points if x > 0]
    ticks = None
    if xs:
        ticks = [2.0**e for e in range(math.floor(math.log2(min(xs))), math.ceil(math.log2(max(xs))) + 1)]
        ticks = ticks[:: max(1, math.ceil(len(ticks) / 11))]
    if any(one.intervals for one in series):
        two = any(number(cell.record, "seeds") == 2 for cell in scores.column(column).values())
        caption += f" Bands: {'the range of two seeds' if two else '95% intervals over the seeds'}."
    trained = float(run.training_length or 0)
    marks = [(trained, "training length")] if xs and min(xs) <= trained <= max(xs) else []
    x = PlotAxis(name, True, lambda value: f"{value:,.0f}", ticks)
    where = length_words(column)
    title = f"{title}, sequences of {where}"
    return line_chart(title, series, x, y, marks, caption.strip(), size, foremost(scores))


def _points(found: Record, edges: str, value: str, low: str, high: str) -> list[tuple[Point, tuple[float, float]]]:
    """(middle of the bin, value) and interval of the bins in a record; NaN for an end that it lacks."""

    def end(part: Mapping[str, float | None], name: str) -> float:
        return math.nan if (number := part.get(name)) is None else number

    return [
        ((max((part["start"] + part["end"]) / 2, 0.5), part[value]), (end(part, low), end(part, high)))
        for part in bins(found, edges, value, "count", low, high)
    ]


def length_words(column: Length) -> str:
    """`8× the training length (512 tokens)`."""
    tokens = f"{column.length:,} tokens" if column.length else ""
    if column.factor is None:
        return tokens
    return f"{times(column.factor)} the training length" + (f" ({tokens})" if tokens else "")
