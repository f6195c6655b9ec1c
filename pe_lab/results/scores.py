"""Result records as scores and as tables: by variant and length, by tokens trained, and averages over tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from pe_lab.results.records import Record, as_dict, bins, number
from pe_lab.results.runs import RunFiles
from pe_lab.results.statistics import Z95, exp, wilson
from pe_lab.results.table import Bucket, Cell, Length, Table, is_prompted, mean_cell, share_cell, with_shares
from pe_lab.results.variants import in_order


def measure(record: Record) -> Cell | None:
    """The main number of a result record, an accuracy, a perplexity or a score; None if it has none.

    Its 95% interval is the record's `low` and `high` where it has them. Else: exp(nll -+ Z95 stderr) of a perplexity;
    Wilson's interval of `queries` or `samples` answers of a share that is 0 or 1, whose standard error is 0; Z95
    standard errors to both sides of any other number. It ends at 0 and 1 for a share.
    """
    stderr, low, high = (number(record, name) for name in ("stderr", "low", "high"))
    ends = None if low is None or high is None else (low, high)
    prompted, accuracy, nll = is_prompted(record), number(record, "accuracy"), number(record, "nll")
    perplexity = number(record, "perplexity") if nll is None else exp(nll)
    if not prompted and accuracy is None and perplexity is not None:
        if perplexity <= 0:
            return None
        nll = math.log(perplexity) if nll is None else nll
        if ends is None and stderr is not None:  # of the loss, whose errors are normal
            ends = exp(nll - Z95 * stderr), exp(nll + Z95 * stderr)
        return Cell(perplexity, -nll, stderr, record, ends=ends)
    names = ("score",) if prompted else ("accuracy", "score", "value", "exact_match", "f1")
    value = next((value for name in names if (value := number(record, name)) is not None), None)
    if value is None:
        return None
    lower = record.get("higher_is_better") is False
    # lm_eval also has metrics from 0 to 100, which may happen to be below 1.
    metric = str(record.get("metric"))
    of_hundred = record.get("suite") == "lm_eval" and metric.startswith(("bleu", "chrf", "rouge", "ter"))
    share = (0 <= value <= 1 and not lower and not of_hundred) if prompted else accuracy is not None
    answers = number(record, "queries") or number(record, "samples")
    if ends is None and share and value in (0.0, 1.0) and answers:
        ends = wilson(value, answers)
    if ends is None and stderr is not None:
        ends = value - Z95 * stderr, value + Z95 * stderr
    if stderr is None and ends is not None:
        stderr = (ends[1] - ends[0]) / (2 * Z95)
    if share:
        if stderr == 0 and answers and 0 <= value <= 1:  # all answers, or none, were right: Agresti and Coull's
            adjusted = (value * answers + 2) / (answers + 4)
            stderr = math.sqrt(adjusted * (1 - adjusted) / (answers + 4))
        return share_cell(value, stderr, record, ends)
    if lower and "perplexity" in metric and value > 0:
        return Cell(value, -math.log(value), stderr and stderr / value, record, ends=ends)
    return Cell(value, -value if lower else value, stderr, record, ends=ends)


def source_of(record: Record) -> str:
    """The source or the task that a record measured; "" if it names none."""
    return str(record.get("source") or record.get("task") or "")


def latest(records: Sequence[Record]) -> list[Record]:
    """The records of the latest checkpoint of each label and phase."""
    whose = [(str(record.get("label")), str(record.get("phase"))) for record in records]
    steps = [number(record, "step") or 0.0 for record in records]
    last: dict[tuple[str, str], float] = {}
    for who, step in zip(whose, steps, strict=True):
        last[who] = max(last.get(who, 0.0), step)
    return [one for one, who, step in zip(records, whose, steps, strict=True) if step == last[who]]


def arrange(records: Iterable[tuple[str, Hashable, Length, Record]]) -> list[Table]:
    """A table for each suite and source, from (suite, label, column, record), in the order of the records.

    Of several checkpoints of a label the latest counts; lengths that only others have are left out. Of repeated records
    the last counts: a task of lm_eval that was asked by itself and in a group has two. A record without a number, of a
    model that diverged, becomes a cell of NaN.
    """
    groups: dict[tuple[str, str], list[tuple[Hashable, Length, Record]]] = {}
    for suite, label, column, record in records:
        groups.setdefault((suite, source_of(record)), []).append((label, column, record))
    tables = []
    for (suite, source), found in groups.items():
        last_step: dict[Hashable, float] = {}
        for label, _, record in found:
            last_step[label] = max(last_step.get(label, 0.0), number(record, "step") or 0.0)
        columns: dict[Hashable, Length] = {}
        cells: dict[tuple[Hashable, Hashable], Cell] = {}
        for label, column, record in found:
            if columns.setdefault(column.key, column).length != column.length:
                columns[column.key] = Length(column.factor, None)  # training lengths differ: only the factor is common
            if (number(record, "step") or 0.0) == last_step[label]:
                cell = measure(record) or Cell(math.nan, -math.inf, None, record)
                cells[label, column.key] = replace(cell, scores=record["by_seed"]) if "by_seed" in record else cell
        rows: dict[Hashable, Record] = {}
        for (label, _), cell in cells.items():
            rows.setdefault(label, cell.record)
        measured = tuple(column for key, column in columns.items() if any(key == at for _, at in cells))
        tables.append(Table(measured, rows, cells, suite, source))
    return tables


# ---------------------------------------------------------------------------------------------------------------------
# The tables of runs


def label_of(record: Record) -> str:
    """The label of a record's variant."""
    label = record.get("label") or " + ".join(str(record[key]) for key in ("model", "variant") if record.get(key))
    return str(label or "unnamed")


def build_tables(suite: str, runs: Sequence[RunFiles]) -> list[Table]:
    """The tables of a suite, one for each source; among several runs a label begins with the run's name.

    The source with most tokens comes first, symbolic needles last.
    """
    records = [(run, record) for run in runs for record in run.evaluation.get(suite, [])]
    phases: dict[tuple[str, str], set[str]] = {}
    for run, record in records:
        phases.setdefault((run.name, label_of(record)), set()).add(str(record.get("phase", "")))
    found: list[tuple[str, Hashable, Length, Record]] = []
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
    return replace(table, columns=columns, rows=in_order(table.rows))


def _tokens_measured(table: Table) -> float:
    """The tokens behind a table; 0 for prompted tasks, which keep the order of their records."""
    if table.prompted:
        return 0.0
    return max((number(cell.record, "tokens") or 0.0 for cell in table.cells.values()), default=0.0)


def column_of(run: RunFiles, record: Record) -> Length | None:
    """The length that a record was measured at."""
    factor, length = number(record, "factor"), number(record, "length")
    if factor is None and length is not None and run.training_length:
        factor = length / run.training_length
    if factor is None and length is None:
        return Length(None, None) if is_prompted(record) else None
    return Length(factor, int(length) if length is not None else None)


# ---------------------------------------------------------------------------------------------------------------------
# Scores by tokens trained


def histories(run: RunFiles, suite: str) -> list[tuple[str, Length, Table]]:
    """(phase, length, table) of a suite, longest sequences first; a table's columns are tokens of training.

    Only of phases of which several steps were measured.
    """
    found: dict[tuple[str, str, float], dict[tuple[str, float], Cell]] = {}
    columns: dict[float, Length] = {}
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
            tokens = tuple(Length(None, trained) for trained in sorted({trained for _, trained in several}))
            result.append((phase, columns[key], Table(tokens, variants, several, suite, source)))
    return result


def tokens_trained(run: RunFiles, record: Record) -> float | None:
    """Training tokens behind a record: its own number, else those that its phase had read at its step."""
    known, step = number(record, "tokens_trained"), number(record, "step")
    if known is not None:
        return known
    phase = run.phase(record.get("phase"))
    return phase.tokens_at(step) if phase and step is not None else None


# ---------------------------------------------------------------------------------------------------------------------
# Tasks that are asked with prompts


def columns_of(tables: Sequence[Table]) -> list[Length]:
    """The lengths of several tasks, each once, shortest first; sequences of their own lengths come before all."""
    found = {column.key: column for table in tables for column in table.columns}
    return [found[key] for key in sorted(found)]


def variants_of(tables: Sequence[Table]) -> dict[str, Record]:
    """The variants of several tasks, in the order of tables."""
    found: dict[str, Record] = {}
    for table in tables:
        found = table.rows | found
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
    rows = {label: record for label, record in variants.items() if label in labels}
    return Table(kept, rows, cells, suite, name)


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
