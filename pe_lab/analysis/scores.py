"""Result records as tables: variant by length, each value with its interval, and the best of each length."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pe_lab.analysis.runs import Run, as_list
from pe_lab.analysis.variants import in_order
from pe_lab.results.formatting import percent, short_number, times
from pe_lab.results.intervals import Z95, interval_of, is_loss, is_prompted, is_share, value_of
from pe_lab.results.records import Record, number


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
      value: the number to show.
      score: the number to compare: higher is better, and its errors are normal.
      stderr: of the score; None if it is not known.
      record: the result record.
      share: whether the value is a share of 1, shown in per cent.
      ends: the 95% interval of the value; None if it is not known.
    """

    value: float
    score: float
    stderr: float | None
    record: Record = field(repr=False)
    share: bool = False
    ends: tuple[float, float] | None = None

    def format(self, value: float) -> str:
        """A number in this cell's unit."""
        return percent(value) if self.share else short_number(value)

    @property
    def shown(self) -> str:
        return self.format(self.value)

    @property
    def interval(self) -> str:
        """`48–57%`; "" if the interval is not known."""
        if self.ends is None:
            return ""
        low, high = map(self.format, self.ends)
        return f"{low.removesuffix('%') if high.endswith('%') else low}–{high}"

    @property
    def all_found(self) -> float | None:
        """The share of prompts whose needles were all found; None if it equals the main number."""
        scores = self.record.get("scores")
        found = number(scores, "all_found") if isinstance(scores, dict) else None
        return found if found is not None and abs(found - self.value) > 1e-6 else None


@dataclass(frozen=True)
class Column:
    """A length: as a multiple of the training length if that is known, and in tokens.

    Both are None for tasks whose sequences have lengths of their own.
    """

    factor: float | None
    length: float | None

    @property
    def title(self) -> str:
        if self.factor is None and self.length is None:
            return "the sequences' own lengths"
        return times(self.factor) if self.factor is not None else f"{self.length:,} tokens"

    @property
    def small(self) -> str:
        """The length in tokens, if the title is a multiple."""
        return f"{self.length:,}" if self.length and self.factor is not None else ""

    @property
    def key(self) -> float:
        return self.factor if self.factor is not None else float(self.length or 0)


@dataclass(frozen=True)
class Table:
    """One suite on one source: `cells` by (label, column key). `variants` maps a label to one of its records."""

    suite: str
    source: str
    columns: tuple[Column, ...]
    variants: dict[str, Record]
    cells: dict[tuple[str, float], Cell]
    higher_is_better: bool
    skipped: int = 0

    @property
    def prompted(self) -> bool:
        """Whether the table is of one task that is asked with prompts."""
        return any(is_prompted(cell.record) for cell in self.cells.values())

    def cell(self, label: str, column: Column) -> Cell | None:
        return self.cells.get((label, column.key))

    def column(self, column: Column) -> dict[str, Cell]:
        """The measurements at one length, by label."""
        return {label: cell for label in self.variants if (cell := self.cell(label, column))}

    def best(self, column: Column) -> tuple[str, set[str]]:
        """The label with the best score at a length, and the labels whose score is a tie with it at 95%."""
        cells = self.column(column)
        if not cells:
            return "", set()
        winner = max(cells, key=lambda label: cells[label].score)
        others = {label: cell for label, cell in cells.items() if label != winner and cells[winner].stderr is not None}
        return winner, {label for label, cell in others.items() if compare(cell, cells[winner]) == "tie"}


def compare(ours: Cell, theirs: Cell) -> str:
    """`win`, `loss`, or `tie` if the difference is within 95% of the noise of both."""
    difference = ours.score - theirs.score
    noise = Z95 * math.hypot(ours.stderr or 0.0, theirs.stderr or 0.0)
    if abs(difference) <= noise or difference == 0:
        return "tie"
    return "win" if difference > 0 else "loss"


def proportion_stderr(share: float, stderr: float | None, answers: float | None) -> float | None:
    """The given standard error; Agresti and Coull's if it is 0 because all answers, or none, were right."""
    if stderr or not answers or not 0 <= share <= 1:
        return stderr
    adjusted = (share * answers + 2) / (answers + 4)
    return math.sqrt(adjusted * (1 - adjusted) / (answers + 4))


def measure(record: Record) -> Cell | None:
    """The main number of a record; None if it has none."""
    value, stderr, ends = value_of(record), number(record, "stderr"), interval_of(record)
    if value is None:
        return None
    if is_loss(record):  # the errors of its logarithm, the loss, are normal
        nll = number(record, "nll")
        nll = math.log(value) if nll is None and value > 0 else nll
        return None if nll is None else Cell(value, -nll, stderr, record, ends=ends)
    if stderr is None and ends is not None:
        stderr = (ends[1] - ends[0]) / (2 * Z95)
    if is_share(record):
        answers = number(record, "queries") or number(record, "samples")
        stderr = None if stderr is None else proportion_stderr(value, stderr, answers)
        return share_cell(value, stderr, record, ends)
    if record.get("higher_is_better") is not False:
        return Cell(value, value, stderr, record, ends=ends)
    if "perplexity" in str(record.get("metric")) and value > 0:
        return Cell(value, -math.log(value), stderr and stderr / value, record, ends=ends)
    return Cell(value, -value, stderr, record, ends=ends)


def share_cell(value: float, stderr: float | None, record: Record, ends: tuple[float, float] | None) -> Cell:
    """A cell of a share of 1, whose interval is cut to 0..1."""
    ends = None if ends is None or stderr is None else (max(ends[0], 0.0), min(ends[1], 1.0))
    return Cell(value, value, stderr, record, True, ends)


def label_of(record: Record) -> str:
    """The label of a record's variant."""
    label = record.get("label") or " + ".join(str(record[key]) for key in ("model", "method") if record.get(key))
    return str(label or "unnamed")


def source_of(record: Record) -> str:
    """The source or the task that a record measured; "" if it names none."""
    return str(record.get("source") or record.get("task") or "")


def build_tables(suite: str, runs: Sequence[Run]) -> list[Table]:
    """The tables of a suite, one for each source; among several runs a label begins with the run's name.

    The source with most tokens comes first, symbolic needles last. Of several checkpoints of a variant the latest
    counts, of repeated records the last.
    """
    records = [(run, record) for run in runs for record in run.evaluation.get(suite, [])]
    sources: dict[str, list[tuple[str, Column, Cell]]] = {}
    skipped: Counter[str] = Counter()
    phases: dict[tuple[str, str], set[str]] = {}
    for run, record in records:
        phases.setdefault((run.name, label_of(record)), set()).add(str(record.get("phase", "")))
    for run, record in records:
        source, label = source_of(record), label_of(record)
        if len(phases[run.name, label]) > 1:  # one label, two sets of weights
            label += f" ({record.get('phase')})"
        if len(runs) > 1:
            label = f"{run.name}: {label}"
        column, cell = column_of(run, record), measure(record)
        if column is None or cell is None:
            skipped[source] += 1
        else:
            sources.setdefault(source, []).append((label, column, cell))
    built = [_build_table(suite, source, found, skipped[source]) for source, found in sources.items()]
    return sorted(built, key=lambda table: (table.source.startswith("needles"), -_tokens_measured(table)))


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


def _build_table(suite: str, source: str, found: Sequence[tuple[str, Column, Cell]], skipped: int) -> Table:
    columns: dict[float, Column] = {}
    cells: dict[tuple[str, float], Cell] = {}
    last_step: dict[str, float] = {}
    for label, _, cell in found:
        last_step[label] = max(last_step.get(label, -1.0), number(cell.record, "step") or 0.0)
    for label, column, cell in found:
        columns.setdefault(column.key, column)
        if columns[column.key].length != column.length:  # training lengths differ: only the factor is common
            columns[column.key] = Column(column.factor, None)
        if (number(cell.record, "step") or 0.0) == last_step[label]:
            cells[label, column.key] = cell
    variants: dict[str, Record] = {}
    for (label, _), cell in cells.items():
        variants.setdefault(label, cell.record)
    records = [cell.record for cell in cells.values()]
    lower = any("nll" in r or "perplexity" in r or r.get("higher_is_better") is False for r in records)
    by_length = tuple(sorted(columns.values(), key=lambda column: column.key))
    return Table(suite, source, by_length, in_order(variants), cells, not lower, skipped)


def bins(found: Mapping[str, Any], edges: str, value: str, *others: str) -> list[dict[str, float | None]]:
    """The bins of parallel lists in a record: `start`, `end`, and the number that each list has for the bin.

    Bins without a value and those whose `count` is 0 are left out; [] if the lists do not fit each other.

    Args:
      found: the record, or the part of it that holds the lists.
      edges: names the borders of the bins, or one place for each value.
      value, others: name the lists of numbers. Of the others, those of another length are left out.
    """
    lists = {name: [number({name: x}, name) for x in as_list(found.get(name))] for name in (edges, value, *others)}
    borders, size = lists.pop(edges), len(lists[value])
    if None in borders or len(borders) not in (size, size + 1):
        return []
    lists = {"start": borders[:size], "end": borders[-size:]} | lists
    names = [name for name, numbers in lists.items() if len(numbers) == size]
    measured = [{name: lists[name][index] for name in names} for index in range(size)]
    return [one for one in measured if one[value] is not None and one.get("count") != 0]


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
            result.append((phase, columns[key], Table(suite, source, tokens, variants, several, True)))
    return result


def tokens_trained(run: Run, record: Record) -> float | None:
    """Training tokens behind a record: its own number, else its step times the tokens of a step of its phase."""
    known, step = number(record, "tokens_trained"), number(record, "step")
    if known is not None:
        return known
    phase = run.phase(record.get("phase"))
    each = number(phase.info, "tokens_per_step") if phase else None
    return step * each if step is not None and each is not None else None
