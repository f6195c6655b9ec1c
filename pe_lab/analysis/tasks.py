"""Tasks that are asked with prompts: averages over the tasks of a suite, and scores by the length of a sequence."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pe_lab.analysis.runs import as_dict
from pe_lab.analysis.scores import Cell, Column, Table, bins, share_cell
from pe_lab.analysis.variants import in_order
from pe_lab.results.intervals import Z95
from pe_lab.results.records import Record, number


@dataclass(frozen=True)
class Bucket(Column):
    """Sequences of `start` up to `length` tokens; `multiples` is the same range in training lengths."""

    start: int = 0
    multiples: str = ""

    @property
    def title(self) -> str:
        start, end = self.start, self.length or 0
        return f"{start // 1024}–{end // 1024}K" if start % 1024 == 0 == end % 1024 else f"{start:,}–{end:,}"

    @property
    def small(self) -> str:
        return self.multiples


def columns_of(tables: Sequence[Table]) -> list[Column]:
    """The lengths of several tasks, each once, shortest first; sequences of their own lengths come before all."""
    found = {column.key: column for table in tables for column in table.columns}
    return [found[key] for key in sorted(found)]


def variants_of(tables: Sequence[Table]) -> dict[str, Record]:
    """The variants of several tasks, in the order of tables."""
    found: dict[str, Record] = {}
    for table in tables:
        found = table.variants | found
    return in_order(found)


def averages(tables: Sequence[Table], averaged: Mapping[str, int | None]) -> Table | None:
    """The mean over tasks by variant and length, for variants that have all tasks; None if there is nothing to average.

    Tasks whose scores are not shares of 1 are left out. `averaged` names the suites that are averaged, with the number
    of their tasks (None: any).
    """
    tables = [table for table in tables if all(cell.share for cell in table.cells.values())]
    if len(tables) < 2 or (suite := tables[0].suite) not in averaged:
        return None
    cells = {}
    for label in variants_of(tables):
        for column in columns_of(tables):
            found = [cell for table in tables if (cell := table.cell(label, column))]
            if len(found) == len(tables):
                cells[label, column.key] = _mean(found)
    n, of = len(tables), averaged[suite] or 0
    name = "average" if n == of else f"mean of {n} of {of} tasks" if n < of else f"mean of {n} tasks"
    return _table_of(suite, name, columns_of(tables), variants_of(tables), cells)


def _table_of(
    suite: str,
    source: str,
    columns: Collection[Column],
    variants: Mapping[str, Record],
    cells: dict[tuple[str, float], Cell],
) -> Table | None:
    """A table with those columns and variants that have cells; None without any."""
    kept = tuple(column for column in columns if any(key == column.key for _, key in cells))
    measured = {label: record for label, record in variants.items() if any(label == known for known, _ in cells)}
    return Table(suite, source, kept, measured, cells, True) if cells else None


def _mean(cells: Sequence[Cell]) -> Cell:
    """The mean of a variant's scores on different tasks, whose errors are independent."""
    value = sum(cell.value for cell in cells) / len(cells)
    errors = [cell.stderr for cell in cells if cell.stderr is not None]
    stderr = math.hypot(*errors) / len(cells) if len(errors) == len(cells) else None
    ends = None if stderr is None else (value - Z95 * stderr, value + Z95 * stderr)
    samples = sum(number(cell.record, "samples") or 0.0 for cell in cells)
    record = {**cells[0].record, "scores": {}, "samples": samples, "truncated": None}
    return share_cell(value, stderr, record, ends)


def by_sequence_length(table: Table, training_length: int | None = None) -> Table | None:
    """A task's scores by the length of the sequence, from the records' `by_length`; None if no record has it."""
    columns: dict[float, Column] = {}
    cells: dict[tuple[str, float], Cell] = {}
    for (label, _), cell in table.cells.items():
        found = as_dict(cell.record.get("by_length"))
        unit = training_length if found.get("of", "tokens") == "tokens" else None
        for here in bins(found, "edges", "score", "low", "high", "count"):
            start, end, score, low, high = map(here.get, ("start", "end", "score", "low", "high"))
            if not 0 <= score <= 1:
                continue
            multiples = f"{start / unit:.3g}–{end / unit:.3g}×" if unit else ""
            column = Bucket(None, int(end), int(start), multiples)
            columns[column.key] = column
            known = (low, high) if low is not None and high is not None else None
            stderr = (known[1] - known[0]) / (2 * Z95) if known else None
            record = {**cell.record, "scores": {}, "samples": here.get("count"), "truncated": None}
            cells[label, column.key] = share_cell(score, stderr, record, known)
    ordered = [column for _, column in sorted(columns.items())]
    return _table_of(table.suite, table.source, ordered, table.variants, cells)
