"""Prints the records of an evaluation: tables with 95% intervals, and needles by depth and length in colour."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from pe_lab.evaluation.tasks import suites
from pe_lab.results.formatting import shortened
from pe_lab.results.intervals import interval_of, is_share, value_of, wilson
from pe_lab.results.records import Record

# From 0% to 100%, light to dark as in the report; a terminal without colours shows the numbers.
COLOURS = ("#eef2ef", "#c3e5d6", "#96d3bb", "#55b594", "#1f8f6c", "#0f6f53", "#004f39")
ALL_FOUND = ", all found"
FIT = {"beta": 3, "c": 3, "nll_before": 4, "nll_after": 4}  # keys of a fitted scale, and their decimals
LOG_WIDTH = 120  # of grids side by side where there is no terminal
Column = tuple[str, Sequence[Text]]  # its title and its cells
LABEL_WIDTH = 80  # of a label; older records have labels of thousands of characters


def open_console() -> Console:
    """A console of the terminal's width; for a log, wide enough for any table."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=1000)


def print_line(text: str, console: Console, style: str = "") -> None:
    """Prints a line as it is: without markup, however long."""
    console.print(text, style=style, soft_wrap=True, markup=False)


def print_records(records: Sequence[Record], console: Console | None = None) -> None:
    """Tables of all suites, with the best of each length or task in bold; needles by depth; and the fitted scales."""
    console = console or open_console()
    shown = names(records)
    by_source = grouped(records, lambda record: (record["suite"], record.get("source")))
    for (suite, source), group in by_source.items():  # first, so that the tables are at the end of the output
        print_heat_maps(f"{suites.title(suite)}: {source}", group, shown, console)
    for (suite, source), group in by_source.items():
        if suite in ("perplexity", "needles"):
            print_by_length(f"{suites.title(suite)} on {source}", group, shown, console)
    for suite, group in grouped(records, lambda record: record["suite"]).items():
        if suite not in ("perplexity", "needles", "beta"):
            print_tasks(suite, [*with_all_found(group)], shown, console)
    for record in records:
        if record["suite"] == "beta":
            found = {name: decimals(record.get(name), n) for name, n in FIT.items()}
            print_line(
                f"{shown[identity(record)]} at {record['length']:,}: β = {found['beta']}, c = {found['c']}, "
                f"held-out loss {found['nll_before']} -> {found['nll_after']}",
                console,
            )


def decimals(value: Any, number: int) -> str:
    """A number with so many decimals; `not a number` for the null of a model that diverged."""
    return f"{value:.{number}f}" if isinstance(value, int | float) else "not a number"


def with_all_found(records: Sequence[Record]) -> Iterator[Record]:
    """The records; after a task with several needles a prompt, the share of prompts whose every needle was found."""
    for group in grouped(records, lambda record: record.get("source")).values():
        yield from group
        every = [(one, (one.get("scores") or {}).get("all_found")) for one in group if value_of(one) is not None]
        every = [(one, found) for one, found in every if found is not None]
        if any(abs(found - one["score"]) > 1e-6 for one, found in every):
            for one, found in every:
                low, high = wilson(found, one["samples"])  # of a prompt, it is 0 or 1
                more = {"score": found, "low": low, "high": high, "metric": "all_found"}
                yield {**one, **more, "source": f"{one['source']}{ALL_FOUND}"}


def grouped(records: Iterable[Record], by: Callable[[Record], Any]) -> dict[Any, list[Record]]:
    """Records by a key, in the order in which keys first occur."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(by(record), []).append(record)
    return groups


def identity(record: Record) -> tuple[Any, ...]:
    """The variant that a record measured: its run, checkpoint, label and method."""
    return record.get("run"), record.get("checkpoint"), record.get("label"), record.get("method")


def names(records: Iterable[Record]) -> dict[tuple[Any, ...], str]:
    """Identity -> its name: the label, shortened, with the run or the checkpoint where labels are the same."""
    found = list(dict.fromkeys(map(identity, records)))
    runs: dict[Any, set[Any]] = {}
    checkpoints: dict[Any, set[Any]] = {}
    for run, checkpoint, label, _ in found:
        runs.setdefault(label, set()).add(run)
        checkpoints.setdefault((run, label), set()).add(checkpoint)
    shown = {}
    for run, checkpoint, label, method in found:
        text = shortened(str(label or ""), LABEL_WIDTH)
        before = f"{run}: " if len(runs[label]) > 1 else ""
        after = f" ({checkpoint})" if len(checkpoints[run, label]) > 1 else ""
        shown[run, checkpoint, label, method] = before + text + after
    return shown


def print_table(title: str, columns: Sequence[Column], row_names: Sequence[str], console: Console) -> None:
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
        table = Table()
        table.add_column("", overflow="fold")
        for head, _ in columns[start:end]:
            table.add_column(Text(head), justify="right")
        for n, name in enumerate(row_names):
            table.add_row(Text(name), *(cells[n] for _, cells in columns[start:end]))
        console.print(table)
        start = end


def length_name(record: Record) -> str:
    """`4,096 (2x)`; empty for samples of their own lengths."""
    if record.get("length") is None:
        return ""
    factor = record.get("factor")
    return f"{record['length']:,}" + (f" ({factor:g}x)" if factor is not None else "")


def column_of(head: str, records: Sequence[Record], variants: Sequence[Any]) -> Column:
    """The cells of the variants, from comparable records; the best in bold."""
    of_variant, best = {identity(record): record for record in records}, winner(records)
    return head, [in_bold(of_variant.get(variant), best) for variant in variants]


def print_by_length(title: str, records: Sequence[Record], shown: Mapping[Any, str], console: Console) -> None:
    """One suite on one source, or one task: variants by length, the best of each length in bold."""
    variants = list(dict.fromkeys(map(identity, records)))
    by_length = grouped(sorted(records, key=lambda record: record.get("length") or 0), length_name)
    columns = [column_of(length or "score", group, variants) for length, group in by_length.items()]
    print_table(f"{title}, 95% intervals", columns, [shown[variant] for variant in variants], console)
    if records[0].get("guessing") is not None:
        # A model that tells a window's values from all others, and not from each other, scores this much.
        chance = f"{records[0]['guessing']:.0%}"
        print_line(f"picking any value that was stated and not yet asked for: {chance}", console)


def print_tasks(suite: str, records: Sequence[Record], shown: Mapping[Any, str], console: Console) -> None:
    """A prompted suite: tasks and variants at each length, or variants by length where it is one task."""
    title = suites.title(suite)
    tasks = grouped(records, lambda record: record.get("source"))
    if len(tasks) == 1:
        metric = str(records[0].get("metric", "score")).replace("_", " ")
        print_by_length(f"{title}: {next(iter(tasks))} ({metric})", records, shown, console)
        return
    metrics = {str(record.get("metric")) for record in records if ALL_FOUND not in str(record.get("source"))}
    title += f", {next(iter(metrics)).replace('_', ' ')}" if len(metrics) == 1 else ""
    for length, group in grouped(sorted(records, key=lambda one: one.get("length") or 0), length_name).items():
        heading = f"{title}{f', at {length} tokens' if length else ''}, 95% intervals"
        print_task_table(heading, suite, group, shown, console, name_metrics=len(metrics) > 1)


def print_task_table(
    title: str, suite: str, records: Sequence[Record], shown: Mapping[Any, str], console: Console, name_metrics: bool
) -> None:
    """Tasks and variants at one length, the larger number in rows; the best of each task in bold."""
    tasks = grouped(records, lambda record: str(record.get("source")))
    variants = list(dict.fromkeys(map(identity, records)))
    columns = []
    for task, group in tasks.items():
        named = f"{task} ({group[0].get('metric')})" if name_metrics and ALL_FOUND not in task else task
        columns.append(column_of(named, group, variants))
    # "All found" is another number of a task that is already in the mean.
    averaged = [group for name, group in tasks.items() if ALL_FOUND not in name and all(map(is_share, group))]
    if suite in suites.AVERAGED and len(averaged) > 1:
        columns.append((f"mean of {len(averaged)}", [Text(mean(averaged, variant)) for variant in variants]))
    row_names = [shown[variant] for variant in variants]
    if len(tasks) >= len(variants):
        transposed = [(name, [cells[n] for _, cells in columns]) for n, name in enumerate(row_names)]
        columns, row_names = transposed, [head for head, _ in columns]
    print_table(title, columns, row_names, console)


def mean(tasks: Sequence[Sequence[Record]], variant: Any) -> str:
    """The mean score of a variant over tasks; a dash where it lacks one."""
    scores = [record["score"] for group in tasks for record in group if identity(record) == variant]
    return f"{100 * math.fsum(scores) / len(scores):.1f}%" if len(scores) == len(tasks) else "–"


def in_bold(record: Record | None, best: float | None) -> Text:
    """A cell, in bold if it is the best."""
    value = None if record is None else value_of(record)
    return Text(describe_cell(record), style="bold" if value is not None and value == best else "")


def winner(records: Sequence[Record]) -> float | None:
    """The best of comparable records."""
    lowest = records[0]["suite"] == "perplexity" or records[0].get("higher_is_better") is False
    values = [value for record in records if (value := value_of(record)) is not None]
    return (min if lowest else max)(values, default=None)


def describe_cell(record: Record | None) -> str:
    """A value with its 95% interval: `17.1 (16.8–17.4)`, `75.0% (62.2–84.5)`."""
    if record is None:
        return "–"
    value, ends = value_of(record), interval_of(record)
    if value is None:
        return "not a number"
    if is_share(record):
        return f"{100 * value:.1f}%" + (f" ({100 * ends[0]:.1f}–{100 * ends[1]:.1f})" if ends else "")
    return three_digits(value) + (f" ({three_digits(ends[0])}–{three_digits(ends[1])})" if ends else "")


def three_digits(value: float) -> str:
    """17.1, 1,234, 2.3e+08."""
    if abs(value) >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def print_heat_maps(title: str, records: Sequence[Record], shown: Mapping[Any, str], console: Console) -> None:
    """Needles by depth and length, a grid a variant, side by side as the width allows; nothing without depths."""
    with_depths = [record for record in records if len((record.get("by_depth") or {}).get("depth", ())) > 1]
    if not with_depths:
        return
    grids = [
        heat_map(shown[name], sorted(group, key=lambda record: record.get("length") or 0))
        for name, group in grouped(with_depths, identity).items()
    ]
    console.print()
    print_line(f"{title}, per cent found by depth of the needle (0 is the text's beginning) and length", console)
    console.print(Columns(grids, padding=(0, 3, 1, 0)), width=min(console.width, LOG_WIDTH))


def heat_map(name: str, records: Sequence[Record]) -> Group:
    """The grid of a variant, the shortest length on the left."""
    table = Table(box=None, padding=0, show_edge=False)
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
    measured = [record for record in records if record["suite"] == "perplexity" and record.get("position_edges")]
    shown = names(measured)
    for (source, length), group in grouped(measured, lambda one: (one.get("source"), one["length"])).items():
        edges = [0, *(2**n for n in range(9, 40) if 2**n < length), length]
        title = f"Perplexity by position in sequences of {length:,} tokens of {source}"
        heads = [f"{first:,} .. {last:,}" for first, last in zip(edges, edges[1:], strict=False)]
        rows = [octave_perplexities(one, edges) for one in group]
        columns = [(head, [Text(row[n]) for row in rows]) for n, head in enumerate(heads)]
        print_table(title, columns, [shown[identity(one)] for one in group], console)


def octave_perplexities(record: Record, edges: Sequence[int]) -> list[str]:
    """The perplexity between neighbouring `edges`, from a record's finer bins of positions."""
    fine, losses = record["position_edges"], record["nll_by_position"]
    bins = [(a, b, nll) for a, b, nll in zip(fine, fine[1:], losses, strict=False) if nll is not None]
    found = []
    for first, last in zip(edges, edges[1:], strict=False):
        inside = [(b - a, nll) for a, b, nll in bins if first <= a and b <= last]
        total = sum(width for width, _ in inside)
        loss = sum(width * nll for width, nll in inside) / total if total else None
        found.append("–" if loss is None or loss > 700 else f"{math.exp(loss):.4g}")
    return found
