"""Prints the records of an evaluation: tables with 95% intervals, and needles by depth and length in colour."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.table import Table as Grid
from rich.text import Text

from pe_lab.evaluation.suites import SUITES, suite_of
from pe_lab.results.formatting import shortened
from pe_lab.results.records import Record, as_dict, bins, number
from pe_lab.results.scores import arrange
from pe_lab.results.statistics import wilson
from pe_lab.results.table import Cell, Length, Table, mean_cell, share_cell, with_shares

# From 0% to 100%, light to dark as in the report; a terminal without colours shows the numbers.
COLOURS = ("#eef2ef", "#c3e5d6", "#96d3bb", "#55b594", "#1f8f6c", "#0f6f53", "#004f39")
ALL_FOUND = ", all found"
LOG_WIDTH = 120  # of grids side by side where there is no terminal
LABEL_WIDTH = 80  # of a label; older records have labels of thousands of characters


def open_console() -> Console:
    """A console of the terminal's width; for a log, wide enough for any table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=1000)


def print_line(text: str, console: Console, style: str = "") -> None:
    """Prints a line as it is: without markup, however long."""
    console.print(text, style=style, soft_wrap=True, markup=False)


@dataclass(frozen=True)
class TokenLength(Length):
    """A length in tokens, `4,096 (2x)`; "" for samples of their own lengths."""

    @property
    def title(self) -> str:
        if self.length is None:
            return ""
        return f"{self.length:,}" + (f" ({self.factor:g}x)" if self.factor is not None else "")

    @property
    def key(self) -> str:
        return self.title


def print_records(records: Sequence[Record], console: Console | None = None) -> None:
    """Tables of all suites, with the best of each length or task in bold; needles by depth; and the fitted scales."""
    console = console or open_console()
    tables = tables_of(records)
    for table in tables:  # first, so that the tables of scores are at the end of the output
        print_heat_maps(table, console)
    arranged: dict[str, dict[str, list[Table]]] = {}
    for table in tables:
        arranged.setdefault(arrangement(table), {}).setdefault(table.suite, []).append(table)
    for table in itertools.chain(*arranged.get("lengths", {}).values()):
        on = f" on {table.source}" if table.source else ""
        print_by_length(f"{suite_of(table.suite).title}{on}", table, console)
    for tasks in arranged.get("tasks", {}).values():
        print_tasks(tasks, console)
    for table in itertools.chain(*arranged.get("lines", {}).values()):
        print_lines(table, console)


def arrangement(table: Table) -> str:
    """How the suite of a table is arranged; one that is not known here by whether its records are of prompts."""
    if table.suite in SUITES:
        return SUITES[table.suite].arrangement
    return "tasks" if table.prompted else "lengths"


def tables_of(records: Sequence[Record]) -> list[Table]:
    """A table for each suite and source.

    Its labels are a variant's name, and what makes it a variant: run, checkpoint, label and variant. The name is the
    label, shortened, with the run or the checkpoint where labels are the same.
    """
    identities = [tuple(map(record.get, ("run", "checkpoint", "label", "variant"))) for record in records]
    runs: dict[Any, set[Any]] = {}
    checkpoints: dict[Any, set[Any]] = {}
    for run, checkpoint, label, _ in identities:
        runs.setdefault(label, set()).add(run)
        checkpoints.setdefault((run, label), set()).add(checkpoint)
    named = []
    for record, (run, checkpoint, label, variant) in zip(records, identities, strict=True):
        before = f"{run}: " if len(runs[label]) > 1 else ""
        after = f" ({checkpoint})" if len(checkpoints[run, label]) > 1 else ""
        name = before + shortened(str(label or ""), LABEL_WIDTH) + after
        column = TokenLength(record.get("factor"), record.get("length"))
        named.append((record["suite"], (name, run, checkpoint, label, variant), column, record))
    return arrange(named)


def print_lines(table: Table, console: Console) -> None:
    """Prints the metrics of each record in a line."""
    for ((name, *_), _), cell in table.cells.items():
        values = [(metric, number(cell.record, metric.key)) for metric in suite_of(table.suite).metrics]
        shown = ", ".join(
            f"{metric.title} = {'not a number' if value is None else f'{value:.{metric.decimals}f}'}"
            for metric, value in values
        )
        print_line(f"{name} at {cell.record['length']:,}: {shown}", console)


def print_table(
    title: str, columns: Sequence[tuple[str, Sequence[Text]]], row_names: Sequence[str], console: Console
) -> None:
    """Prints a table below its title; a table that is wider than the console is printed in parts."""
    console.print()
    print_line(title, console, "italic")
    # A word of a number is never broken: columns that do not fit below one another go into a further table.
    words = [" ".join([head, *map(str, cells)]).split() for head, cells in columns]
    widths = [max(map(len, of_column), default=0) + 3 for of_column in words]
    first = min(max(map(len, row_names), default=0), max(console.width // 4, 12)) + 4
    start = 0
    while start < len(columns):
        end = start + 1
        while end < len(columns) and first + sum(widths[start : end + 1]) <= console.width:
            end += 1
        table = Grid()
        table.add_column("", overflow="fold")
        for head, _ in columns[start:end]:
            table.add_column(Text(head), justify="right")
        for n, name in enumerate(row_names):
            table.add_row(Text(name), *(cells[n] for _, cells in columns[start:end]))
        console.print(table)
        start = end


def print_by_length(title: str, table: Table, console: Console) -> None:
    """One suite on one source, or one task: variants by length, the best of each length in bold."""
    columns = [(column.title or "score", cell_texts(table, column, table.rows)) for column in by_tokens([table])]
    print_table(f"{title}, 95% intervals", columns, [name for name, *_ in table.rows], console)
    guessing = number(next(iter(table.rows.values())), "guessing")
    if guessing is not None:
        # A model that tells a window's values from all others, and not from each other, scores this much.
        print_line(f"picking any value that was stated and not yet asked for: {guessing:.0%}", console)


def print_tasks(tasks: Sequence[Table], console: Console) -> None:
    """A prompted suite: tasks and variants at each length, or variants by length where it is one task."""
    title, metrics = suite_of(tasks[0].suite).title, list(dict.fromkeys(task.metric for task in tasks))
    metric = metrics[0].replace("_", " ")
    tables = []
    for task in tasks:
        named = replace(task, source=f"{task.source} ({task.metric})") if len(metrics) > 1 else task
        tables += filter(None, (named, all_found(task)))
    if len(tables) == 1:
        print_by_length(f"{title}: {tasks[0].source} ({metric})", tasks[0], console)
        return
    title += f", {metric}" if len(metrics) == 1 else ""
    for column in by_tokens(tasks):
        at = f", at {column.title} tokens" if column.title else ""
        measured = [table for table in tables if table.column(column)]
        print_task_table(f"{title}{at}, 95% intervals", measured, column, console)


def all_found(table: Table) -> Table | None:
    """The shares of prompts whose every needle was found; None if they are the scores of the table."""
    cells = {
        key: share_cell(cell.all_found, None, cell.record, wilson(cell.all_found, cell.record["samples"]))
        for key, cell in table.cells.items()
        if cell.all_found is not None and not math.isnan(cell.value)
    }
    if all(abs(cell.value - table.cells[key].value) <= 1e-6 for key, cell in cells.items()):
        return None
    return replace(table, source=f"{table.source}{ALL_FOUND}", cells=cells)


def by_tokens(tables: Iterable[Table]) -> list[Length]:
    """The lengths of tables, each once, shortest first."""
    columns = {column.key: column for table in tables for column in table.columns}
    return sorted(columns.values(), key=lambda column: column.length or 0)


def print_task_table(title: str, tables: Sequence[Table], column: Length, console: Console) -> None:
    """Tasks and variants at one length, the larger number in rows; the best of each task in bold."""
    variants = list(dict.fromkeys(variant for table in tables for variant in table.column(column)))
    columns = [(table.source, cell_texts(table, column, variants)) for table in tables]
    # "All found" is another number of a task that is already in the mean.
    averaged = with_shares(table for table in tables if ALL_FOUND not in table.source)
    if suite_of(tables[0].suite).average_of is not None and len(averaged) > 1:
        means = [mean_cell(averaged, variant, column) for variant in variants]
        texts = [Text(f"{100 * mean.value:.1f}%" if mean else "–") for mean in means]
        columns.append((f"mean of {len(averaged)}", texts))
    row_names = [name for name, *_ in variants]
    if len(tables) >= len(variants):
        transposed = [(name, [cells[n] for _, cells in columns]) for n, name in enumerate(row_names)]
        columns, row_names = transposed, [head for head, _ in columns]
    print_table(title, columns, row_names, console)


def cell_texts(table: Table, column: Length, variants: Iterable[Hashable]) -> list[Text]:
    """The cells of the variants at a length; the best in bold."""
    cells = table.column(column)
    best = max((cell.score for cell in cells.values() if not math.isnan(cell.value)), default=None)
    found = [cells.get(variant) for variant in variants]
    return [Text(describe_cell(cell), style="bold" if cell and cell.score == best else "") for cell in found]


def describe_cell(cell: Cell | None) -> str:
    """A value with its 95% interval: `17.1 (16.8–17.4)`, `75.0% (62.2–84.5)`."""
    if cell is None:
        return "–"
    if math.isnan(cell.value):
        return "not a number"
    numbers = [cell.value, *(cell.ends or ())]
    value, *ends = [f"{100 * number:.1f}" if cell.share else three_digits(number) for number in numbers]
    return value + ("%" if cell.share else "") + (f" ({'–'.join(ends)})" if ends else "")


def three_digits(value: float) -> str:
    """17.1, 1,234, 2.3e+08."""
    if abs(value) >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def print_heat_maps(table: Table, console: Console) -> None:
    """Needles by depth and length, a grid a variant, side by side as the width allows; nothing without depths."""
    grids = []
    for variant in table.rows:
        records = [cell.record for column in by_tokens([table]) if (cell := table.cell(variant, column))]
        if with_depths := [one for one in records if len(as_dict(one.get("by_depth")).get("depth", ())) > 1]:
            grids.append(heat_map(variant[0], with_depths))
    if not grids:
        return
    console.print()
    title = f"{suite_of(table.suite).title}: {table.source}"
    print_line(f"{title}, per cent found by depth of the needle (0 is the text's beginning) and length", console)
    console.print(Columns(grids, padding=(0, 3, 1, 0)), width=min(console.width, LOG_WIDTH))


def heat_map(name: str, records: Sequence[Record]) -> Group:
    """The grid of a variant, the shortest length on the left."""
    table = Grid(box=None, padding=0, show_edge=False)
    table.add_column("depth", justify="right")
    for record in records:
        factor = record.get("factor")
        head = f"{factor:g}x" if factor is not None else f"{record['length']:,}" if record.get("length") else "all"
        table.add_column(head, justify="right", min_width=5)
    cells = [dict(zip(one["by_depth"]["depth"], one["by_depth"]["score"], strict=False)) for one in records]
    for depth in sorted({depth for found in cells for depth in found}):
        table.add_row(f"{depth:g}% ", *(heat_cell(found.get(depth)) for found in cells))
    return Group(Text(name, style="bold"), table)


def heat_cell(score: float | None) -> Text:
    """Per cent on the colour of its step; a dot where nothing was measured."""
    if score is None:
        return Text("  ·  ", style="dim")
    step = round(min(max(score, 0.0), 1.0) * (len(COLOURS) - 1))
    ink = "#04100b" if step < 4 else "#ffffff"
    return Text(f" {100 * score:3.0f} ", style=f"{ink} on {COLOURS[step]}")


def print_by_position(records: Sequence[Record], console: Console | None = None) -> None:
    """Perplexity by the position of the token, in octaves: where in a long sequence a variant fails."""
    console = console or open_console()
    measured = [record for record in records if record.get("position_edges")]
    for table in tables_of([record | {"factor": None} for record in measured]):  # equal lengths in tokens are together
        for column in table.columns:
            edges = [0, *(2**n for n in range(9, 40) if 2**n < column.length), column.length]
            title = (
                f"{suite_of(table.suite).title} by position in sequences of {column.length:,} tokens of {table.source}"
            )
            heads = [f"{first:,} .. {last:,}" for first, last in zip(edges, edges[1:], strict=False)]
            found = table.column(column)
            rows = [octave_perplexities(cell.record, edges) for cell in found.values()]
            columns = [(head, [Text(row[n]) for row in rows]) for n, head in enumerate(heads)]
            print_table(title, columns, [name for name, *_ in found], console)


def octave_perplexities(record: Record, edges: Sequence[int]) -> list[str]:
    """The perplexity between neighbouring `edges`, from a record's finer bins of positions."""
    fine = bins(record, "position_edges", "nll_by_position")
    found = []
    for first, last in zip(edges, edges[1:], strict=False):
        inside = [one for one in fine if first <= one["start"] and one["end"] <= last]
        total = sum(one["end"] - one["start"] for one in inside)
        loss = sum((one["end"] - one["start"]) * one["nll_by_position"] for one in inside) / total if total else None
        found.append("–" if loss is None or loss > 700 else f"{math.exp(loss):.4g}")
    return found
