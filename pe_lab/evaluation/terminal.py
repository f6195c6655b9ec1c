"""What an evaluation found, printed: tables with 95% intervals, and needles by depth and length in colour."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pe_lab.evaluation.tasks import suites
from pe_lab.results.intervals import Z95, wilson
from pe_lab.results.records import Record

# None found to all found, light to dark as on the report's pages; a terminal without colours has the numbers.
COLOURS = ("#eef2ef", "#c3e5d6", "#96d3bb", "#55b594", "#1f8f6c", "#0f6f53", "#004f39")
ALL_FOUND = ", all found"
FIT = {"beta": 3, "c": 3, "nll_before": 4, "nll_after": 4}  # what is told of a fitted scale, and its decimals
LOG_WIDTH = 120  # of what is laid side by side where there is no terminal


def open_console() -> Any:
    """A rich console; one for a log, which has no width of its own, breaks no line of a table."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=1000)


def say(text: str, console: Any = None) -> None:
    """A line, as it is, however long."""
    (console or open_console()).print(text, soft_wrap=True, markup=False)


def print_rows(rows: Sequence[Record], console: Any = None) -> None:
    """Tables of all suites, the best of each length or task in bold; needles by depth; and the fitted scales.

    Args:
      rows: summaries as evaluations write them, of one or several runs.
      console: rich's; by default standard output.
    """
    console = console or open_console()
    shown = names(rows)
    by_source = grouped(rows, lambda row: (row["suite"], row.get("source")))
    for (suite, source), group in by_source.items():  # first, so that the tables are what one sees last
        print_heat_maps(f"{suites.title(suite)}: {source}", group, shown, console)
    for (suite, source), group in by_source.items():
        if suite in ("perplexity", "needles"):
            print_by_length(f"{suites.title(suite)} on {source}", group, shown, console)
    for suite, group in grouped(rows, lambda row: row["suite"]).items():
        if suite not in ("perplexity", "needles", "beta"):
            print_tasks(suite, [*with_all_found(group)], shown, console)
    for row in rows:
        if row["suite"] == "beta":
            found = {name: decimals(row.get(name), n) for name, n in FIT.items()}
            say(
                f"{shown[identity(row)]} at {row['length']:,}: β = {found['beta']}, c = {found['c']}, "
                f"held-out loss {found['nll_before']} -> {found['nll_after']}",
                console,
            )


def decimals(value: Any, number: int) -> str:
    """A number with so many decimals; a model that diverged has none."""
    return f"{value:.{number}f}" if isinstance(value, int | float) else "not a number"


def with_all_found(rows: Sequence[Record]) -> Iterator[Record]:
    """The rows; after a task in which several needles are asked for, the share of prompts whose every one was found."""
    for group in grouped(rows, lambda row: row.get("source")).values():
        yield from group
        every = [(row, (row.get("scores") or {}).get("all_found")) for row in group if main_value(row) is not None]
        every = [(row, found) for row, found in every if found is not None]
        if any(abs(found - row["score"]) > 1e-6 for row, found in every):
            for row, found in every:
                low, high = wilson(found, row["samples"])  # of a prompt, it is 0 or 1
                more = {"score": found, "low": low, "high": high, "metric": "all_found"}
                yield {**row, **more, "source": f"{row['source']}{ALL_FOUND}"}


def grouped(rows: Iterable[Record], by: Any) -> dict[Any, list[Record]]:
    """Rows by a key, in the order in which keys are first met."""
    groups: dict[Any, list[Record]] = {}
    for row in rows:
        groups.setdefault(by(row), []).append(row)
    return groups


def identity(row: Record) -> tuple[Any, ...]:
    """Whose row it is: one model, read in one way."""
    return row.get("run"), row.get("checkpoint"), row.get("label")


def names(rows: Iterable[Record]) -> dict[tuple[Any, ...], str]:
    """Identity -> what it is called: its label, with the run or the checkpoint where labels are the same."""
    found = list(dict.fromkeys(map(identity, rows)))
    runs: dict[Any, set[Any]] = {}
    checkpoints: dict[Any, set[Any]] = {}
    for run, checkpoint, label in found:
        runs.setdefault(label, set()).add(run)
        checkpoints.setdefault((run, label), set()).add(checkpoint)
    return {
        (run, checkpoint, label): (f"{run}: " if len(runs[label]) > 1 else "")
        + str(label or "")
        + (f" ({checkpoint})" if len(checkpoints[run, label]) > 1 else "")
        for run, checkpoint, label in found
    }


def print_titled(title: str, table: Any, console: Any) -> None:
    """A table below its title, which is a line of its own: rich would break it to the table's width."""
    from rich.text import Text

    console.print()
    console.print(Text(title, style="italic"), soft_wrap=True)
    console.print(table)


def new_table(corner: str, heads: Iterable[str]) -> Any:
    """A table with a column of names and one of figures for each head."""
    from rich.table import Table

    table = Table(corner)
    for head in heads:
        table.add_column(plain(head), justify="right")
    return table


def length_name(row: Record) -> str:
    """`4,096 (2x)`; nothing for texts of their own lengths."""
    if row.get("length") is None:
        return ""
    factor = row.get("factor")
    return f"{row['length']:,}" + (f" ({factor:g}x)" if factor is not None else "")


def print_by_length(title: str, rows: Sequence[Record], shown: Mapping[Any, str], console: Any) -> None:
    """One suite on one source, or one task: method by length."""
    by_length = grouped(sorted(rows, key=lambda row: row.get("length") or 0), length_name)
    best = {length: winner(group) for length, group in by_length.items()}
    print_titled(f"{title}, 95% intervals", by_length_table(rows, list(by_length), best, shown), console)
    if rows[0].get("guessing") is not None:
        # What tells the values of a window from all others, and not one from another, already scores this much.
        say(f"picking any value that was stated and not yet asked for: {rows[0]['guessing']:.0%}", console)


def by_length_table(
    rows: Sequence[Record], lengths: Sequence[str], best: Mapping[str, float | None], shown: Mapping[Any, str]
) -> Any:
    """Method by length as a rich table; `best` of each length is bold."""
    table = new_table("", (length or "score" for length in lengths))
    cells = {(identity(row), length_name(row)): row for row in rows}
    for name in dict.fromkeys(map(identity, rows)):
        found = [cells.get((name, length)) for length in lengths]
        table.add_row(plain(shown[name]), *(in_bold(row, best[at]) for row, at in zip(found, lengths, strict=True)))
    return table


def print_tasks(suite: str, rows: Sequence[Record], shown: Mapping[Any, str], console: Any) -> None:
    """A suite that asks with prompts: tasks and methods at each length, or method by length where it is one task."""
    title = suites.title(suite)
    tasks = grouped(rows, lambda row: row.get("source"))
    if len(tasks) == 1:
        metric = str(rows[0].get("metric", "score")).replace("_", " ")
        print_by_length(f"{title}: {next(iter(tasks))} ({metric})", rows, shown, console)
        return
    metrics = {str(row.get("metric")) for row in rows if ALL_FOUND not in str(row.get("source"))}
    title += f", {metrics.pop().replace('_', ' ')}" if len(metrics) == 1 else ""
    for length, at_length in grouped(sorted(rows, key=lambda row: row.get("length") or 0), length_name).items():
        heading = f"{title}{f', at {length} tokens' if length else ''}, 95% intervals"
        print_titled(heading, task_table(suite, at_length, shown, name_metrics=len(metrics) > 1), console)


def task_table(suite: str, rows: Sequence[Record], shown: Mapping[Any, str], name_metrics: bool) -> Any:
    """Tasks and methods at one length, whichever are more going down; the best of each task in bold."""
    tasks = grouped(rows, lambda row: str(row.get("source")))
    methods = list(dict.fromkeys(map(identity, rows)))
    columns = {
        f"{task} ({group[0].get('metric')})" if name_metrics and ALL_FOUND not in task else task: column_of(
            group, methods
        )
        for task, group in tasks.items()
    }
    # "All found" is another number of a task that is there already.
    averaged = means([g for name, g in tasks.items() if ALL_FOUND not in name and all(map(is_share, g))], methods)
    if suite in suites.AVERAGED and averaged:
        columns |= averaged
    if len(tasks) >= len(methods):
        table = new_table("", (shown[method] for method in methods))
        for task, cells in columns.items():
            table.add_row(plain(task), *cells)
    else:
        table = new_table("", columns)
        for index, method in enumerate(methods):
            table.add_row(plain(shown[method]), *(cells[index] for cells in columns.values()))
    return table


def column_of(rows: Sequence[Record], methods: Sequence[Any]) -> list[Any]:
    """The cells of one task, a method each, the best in bold."""
    cells, best = {identity(row): row for row in rows}, winner(rows)
    return [in_bold(cells.get(method), best) for method in methods]


def means(tasks: Sequence[Sequence[Record]], methods: Sequence[Any]) -> dict[str, list[Any]]:
    """The mean over all of some tasks for each method that has them; nothing for a single task."""
    if len(tasks) < 2:
        return {}
    cells = []
    for method in methods:
        scores = [row["score"] for group in tasks for row in group if identity(row) == method]
        cells.append(plain(f"{100 * math.fsum(scores) / len(scores):.1f}%" if len(scores) == len(tasks) else "–"))
    return {f"mean of {len(tasks)}": cells}


def plain(text: str) -> Any:
    """Text that is no markup, whatever it says."""
    from rich.text import Text

    return Text(text)


def in_bold(row: Record | None, best: float | None) -> Any:
    """A cell, in bold if it is the best."""
    from rich.text import Text

    value = None if row is None else main_value(row)
    return Text(describe_cell(row), style="bold" if value is not None and value == best else "")


def main_value(row: Record) -> float | None:
    """The number that a row is compared by."""
    key = {"needles": "accuracy", "perplexity": "perplexity"}.get(row["suite"], "score")
    value = row.get(key)
    return value if isinstance(value, int | float) else None


def winner(rows: Iterable[Record]) -> float | None:
    """The best of comparable rows."""
    rows = list(rows)
    lowest = rows[0]["suite"] == "perplexity" or rows[0].get("higher_is_better") is False
    values = [value for row in rows if (value := main_value(row)) is not None]
    return (min if lowest else max)(values, default=None)


def is_share(row: Record) -> bool:
    """Whether a task's score is a share of 1, shown in per cent."""
    score = main_value(row)
    of_hundred = row["suite"] == "lm_eval" and str(row.get("metric")).startswith(("bleu", "chrf", "rouge", "ter"))
    return score is not None and 0 <= score <= 1 and row.get("higher_is_better") is not False and not of_hundred


def describe_cell(row: Record | None) -> str:
    """A value with its 95% interval: `17.1 (16.8–17.4)`, `75.0% (62.2–84.5)`."""
    if row is None:
        return "–"
    value, stderr = main_value(row), row.get("stderr")
    if value is None:
        return "not a number"
    if row["suite"] == "perplexity":
        # A relative error of perplexity is an absolute one of the loss.
        ends = [value * math.exp(sign * Z95 * stderr) for sign in (-1, 1)] if stderr else None
        return three_digits(value) + (f" ({three_digits(ends[0])}–{three_digits(ends[1])})" if ends else "")
    ends = interval(row, value, stderr)
    if row["suite"] == "needles" or is_share(row):
        return f"{100 * value:.1f}%" + (f" ({100 * ends[0]:.1f}–{100 * ends[1]:.1f})" if ends else "")
    return three_digits(value) + (f" ({three_digits(ends[0])}–{three_digits(ends[1])})" if ends else "")


def interval(row: Record, value: float, stderr: float | None) -> tuple[float, float] | None:
    """The 95% interval of a score: the row's own, else Wilson's where all or none was right, else 1.96 errors."""
    if row.get("low") is not None and row.get("high") is not None:
        return row["low"], row["high"]
    share = row["suite"] == "needles" or is_share(row)
    asked = row.get("queries") or row.get("samples")
    if share and value in (0.0, 1.0) and asked:
        return wilson(value, int(asked))
    if stderr is None:
        return None
    low, high = value - Z95 * stderr, value + Z95 * stderr
    return (max(low, 0.0), min(high, 1.0)) if share else (low, high)


def three_digits(value: float) -> str:
    """17.1, 1,234, 2.3e+08."""
    if abs(value) >= 1e6:
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def print_heat_maps(title: str, rows: Sequence[Record], shown: Mapping[Any, str], console: Any) -> None:
    """Needles by depth and length, a grid a method, side by side as the width allows; nothing without depths."""
    from rich.columns import Columns

    with_depths = [row for row in rows if len((row.get("by_depth") or {}).get("depth", ())) > 1]
    if not with_depths:
        return
    grids = [
        heat_map(shown[name], sorted(group, key=lambda row: row.get("length") or 0))
        for name, group in grouped(with_depths, identity).items()
    ]
    console.print()
    say(f"{title}, per cent found by depth of the needle (0 is the text's beginning) and length", console)
    console.print(Columns(grids, padding=(0, 3, 1, 0)), width=min(console.width, LOG_WIDTH))


def heat_map(name: str, rows: Sequence[Record]) -> Any:
    """One method's grid, shortest texts on the left."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=0, show_edge=False)
    table.add_column("depth", justify="right")
    for row in rows:
        factor = row.get("factor")
        head = f"{factor:g}x" if factor is not None else f"{row['length']:,}" if row.get("length") else "all"
        table.add_column(head, justify="right", min_width=5)
    cells = [dict(zip(row["by_depth"]["depth"], row["by_depth"]["score"], strict=False)) for row in rows]
    for depth in sorted({depth for found in cells for depth in found}):
        table.add_row(f"{depth:g}% ", *(heat_cell(found.get(depth)) for found in cells))
    return Group(Text(name, style="bold"), table)


def heat_cell(score: float | None) -> Any:
    """Per cent on the colour of its step; a dot where nothing was measured."""
    from rich.text import Text

    if score is None:
        return Text("  ·  ", style="dim")
    step = round(min(max(score, 0.0), 1.0) * (len(COLOURS) - 1))
    ink = "#04100b" if step < 4 else "#ffffff"
    return Text(f" {100 * score:3.0f} ", style=f"{ink} on {COLOURS[step]}")


def print_by_position(rows: Sequence[Record], console: Any = None) -> None:
    """Perplexity of the tokens between two positions, by octaves: where in a long text a method fails."""
    console = console or open_console()
    measured = [row for row in rows if row["suite"] == "perplexity" and row.get("position_edges")]
    shown = names(measured)
    for (source, length), group in grouped(measured, lambda row: (row.get("source"), row["length"])).items():
        edges = [0, *(2**n for n in range(9, 40) if 2**n < length), length]
        table = new_table("", (f"{first:,} .. {last:,}" for first, last in zip(edges, edges[1:], strict=False)))
        for row in group:
            table.add_row(plain(shown[identity(row)]), *octave_perplexities(row, edges))
        print_titled(f"Perplexity by position in texts of {length:,} tokens of {source}", table, console)


def octave_perplexities(row: Record, edges: Sequence[int]) -> list[str]:
    """Perplexity between each two of `edges`, from a row's finer bins of positions."""
    fine, losses = row["position_edges"], row["nll_by_position"]
    bins = [(a, b, nll) for a, b, nll in zip(fine, fine[1:], losses, strict=False) if nll is not None]
    found = []
    for first, last in zip(edges, edges[1:], strict=False):
        inside = [(b - a, nll) for a, b, nll in bins if first <= a and b <= last]
        total = sum(width for width, _ in inside)
        mean = sum(width * nll for width, nll in inside) / total if total else None
        found.append("–" if mean is None or mean > 700 else f"{math.exp(mean):.4g}")
    return found
