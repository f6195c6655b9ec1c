"""Tables of runs: of one suite by variant and length, by tokens trained, by the length of a sequence, and averages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from pe_lab.results.records import Record, as_dict, bins, number
from pe_lab.results.runs import Run
from pe_lab.results.scores import (
    Cell,
    Column,
    Table,
    arrange,
    is_prompted,
    mean_cell,
    measure,
    source_of,
    with_shares,
)
from pe_lab.results.variants import in_order


def label_of(record: Record) -> str:
    """The label of a record's variant."""
    label = record.get("label") or " + ".join(str(record[key]) for key in ("model", "variant") if record.get(key))
    return str(label or "unnamed")


def build_tables(suite: str, runs: Sequence[Run]) -> list[Table]:
    """The tables of a suite, one for each source; among several runs a label begins with the run's name.

    The source with most tokens comes first, symbolic needles last.
    """
    records = [(run, record) for run in runs for record in run.evaluation.get(suite, [])]
    phases: dict[tuple[str, str], set[str]] = {}
    for run, record in records:
        phases.setdefault((run.name, label_of(record)), set()).add(str(record.get("phase", "")))
    found: list[tuple[str, Hashable, Column, Record]] = []
    skipped: Counter[str] = Counter()
    for run, record in records:
        label, column = label_of(record), column_of(run, record)
        if len(phases[run.name, label]) > 1:  # one label, two sets of weights
            label += f" ({record.get('phase')})"
        if len(runs) > 1:
            label = f"{run.name}: {label}"
        if column is None or measure(record) is None:
            skipped[source_of(record)] += 1
        else:
            found.append((suite, label, column, record))
    tables = [replace(_sorted(table), skipped=skipped[table.source]) for table in arrange(found)]
    return sorted(tables, key=lambda table: (table.source.startswith("needles"), -_tokens_measured(table)))


def _sorted(table: Table) -> Table:
    """The table with its shortest length first, and its variants in the order of tables."""
    columns = tuple(sorted(table.columns, key=lambda column: column.key))
    return replace(table, columns=columns, variants=in_order(table.variants))


def _tokens_measured(table: Table) -> float:
    """The tokens behind a table; 0 for prompted tasks, which keep the order of their records."""
    if table.prompted:
        return 0.0
    return max((number(cell.record, "tokens") or 0.0 for cell in table.cells.values()), default=0.0)


def column_of(run: Run, record: Record) -> Column | None:
    """The length that a record was measured at."""
    factor, length = number(record, "factor"), number(record, "length")
    if factor is None and length is not None and run.training_length:
        factor = length / run.training_length
    if factor is None and length is None:
        return Column(None, None) if is_prompted(record) else None
    return Column(factor, int(length) if length is not None else None)


# ---------------------------------------------------------------------------------------------------------------------
# Scores by tokens trained


def histories(run: Run, suite: str) -> list[tuple[str, Column, Table]]:
    """(phase, length, table) of a suite, longest sequences first; a table's columns are tokens of training.

    Only of phases of which several steps were measured.
    """
    found: dict[tuple[str, str, float], dict[tuple[str, float], Cell]] = {}
    columns: dict[float, Column] = {}
    for record in run.evaluation.get(suite, []):
        column, cell, trained = column_of(run, record), measure(record), tokens_trained(run, record)
        if column is not None and cell is not None and trained is not None:
            columns.setdefault(column.key, column)
            cells = found.setdefault((source_of(record), str(record.get("phase", "")), column.key), {})
            cells[label_of(record), trained] = cell
    result = []
    for (source, phase, key), cells in sorted(found.items(), key=lambda item: -item[0][2]):
        steps = Counter(label for label, _ in cells)
        several = {(label, trained): cell for (label, trained), cell in cells.items() if steps[label] > 1}
        if several:
            variants = {label: cell.record for (label, _), cell in several.items()}
            tokens = tuple(Column(None, trained) for trained in sorted({trained for _, trained in several}))
            result.append((phase, columns[key], Table(suite, source, tokens, variants, several)))
    return result


def tokens_trained(run: Run, record: Record) -> float | None:
    """Training tokens behind a record: its own number, else those that its phase had read at its step."""
    known, step = number(record, "tokens_trained"), number(record, "step")
    if known is not None:
        return known
    phase = run.phase(record.get("phase"))
    return phase.tokens_at(step) if phase and step is not None else None


# ---------------------------------------------------------------------------------------------------------------------
# Tasks that are asked with prompts


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
    tables = with_shares(tables)
    if len(tables) < 2 or (suite := tables[0].suite) not in averaged:
        return None
    variants, columns = variants_of(tables), columns_of(tables)
    pairs = [(label, column) for label in variants for column in columns]
    cells = {(label, column.key): cell for label, column in pairs if (cell := mean_cell(tables, label, column))}
    if not cells:
        return None
    n, of = len(tables), averaged[suite] or 0
    name = "average" if n == of else f"mean of {n} of {of} tasks" if n < of else f"mean of {n} tasks"
    labels, keys = {label for label, _ in cells}, {key for _, key in cells}
    kept = tuple(column for column in columns if column.key in keys)
    return Table(suite, name, kept, {label: record for label, record in variants.items() if label in labels}, cells)


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


def by_sequence_length(table: Table, training_length: int | None = None) -> Table | None:
    """A task's scores by the length of the sequence, from the records' `by_length`; None if no record has it."""
    records = []
    for (label, _), cell in table.cells.items():
        found = as_dict(cell.record.get("by_length"))
        unit = training_length if found.get("of", "tokens") == "tokens" else None
        for here in bins(found, "edges", "score", "low", "high", "count"):
            start, end = here["start"], here["end"]
            if 0 <= here["score"] <= 1:
                multiples = f"{start / unit:.3g}–{end / unit:.3g}×" if unit else ""
                numbers = {"score": here["score"], "low": here.get("low"), "high": here.get("high"), "stderr": None}
                record = cell.record | numbers | {"scores": {}, "samples": here.get("count"), "truncated": None}
                records.append((table.suite, label, Bucket(None, int(end), int(start), multiples), record))
    return next(map(_sorted, arrange(records)), None)
