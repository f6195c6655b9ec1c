"""Result records as scores and as tables: variant by length, each value with its interval, the best of each length."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from pe_lab.results.formatting import percent, short_number, times
from pe_lab.results.intervals import Z95, exp, wilson
from pe_lab.results.records import Record, as_dict, number


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
    def higher_is_better(self) -> bool:
        """Whether a higher value is better: not of losses and perplexities."""
        known = self.record
        return not ("nll" in known or "perplexity" in known or known.get("higher_is_better") is False)

    @property
    def all_found(self) -> float | None:
        """The share of prompts whose needles were all found; None where prompts have no needles."""
        return number(as_dict(self.record.get("scores")), "all_found")


def is_prompted(record: Record) -> bool:
    """Whether a record is of a task that is asked with prompts: it names the metric of its score."""
    return isinstance(record.get("metric"), str) and "score" in record


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


def share_cell(value: float, stderr: float | None, record: Record, ends: tuple[float, float] | None) -> Cell:
    """A cell of a share of 1, whose interval is cut to 0..1."""
    ends = None if ends is None else (max(ends[0], 0.0), min(ends[1], 1.0))
    return Cell(value, value, stderr, record, True, ends)


def compare(ours: Cell, theirs: Cell) -> str:
    """`win`, `loss`, or `tie` if the difference is within 95% of the noise of both."""
    difference = ours.score - theirs.score
    noise = Z95 * math.hypot(ours.stderr or 0.0, theirs.stderr or 0.0)
    if abs(difference) <= noise or difference == 0:
        return "tie"
    return "win" if difference > 0 else "loss"


# ---------------------------------------------------------------------------------------------------------------------
# Tables


@dataclass(frozen=True)
class Column:
    """A length: as a multiple of the training length if that is known, and in tokens.

    Both are None for tasks whose sequences have lengths of their own. Columns of equal `key` are the same column.
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
    def key(self) -> Hashable:
        return self.factor if self.factor is not None else float(self.length or 0)


@dataclass(frozen=True)
class Table:
    """One suite on one source.

    Attributes:
      columns: the lengths.
      variants: the label of each variant, and one of its records.
      cells: by (label, column key).
      skipped: how many records have no number or no length.
    """

    suite: str
    source: str
    columns: tuple[Column, ...]
    variants: dict[Hashable, Record]
    cells: dict[tuple[Hashable, Hashable], Cell]
    skipped: int = 0

    @property
    def higher_is_better(self) -> bool:
        return all(cell.higher_is_better for cell in self.cells.values())

    @property
    def prompted(self) -> bool:
        """Whether the table is of one task that is asked with prompts."""
        return any(is_prompted(cell.record) for cell in self.cells.values())

    @property
    def metric(self) -> str:
        """The metric of a prompted task; "" of any other table."""
        return next((str(cell.record["metric"]) for cell in self.cells.values() if is_prompted(cell.record)), "")

    def cell(self, label: Hashable, column: Column) -> Cell | None:
        return self.cells.get((label, column.key))

    def column(self, column: Column) -> dict[Hashable, Cell]:
        """The measurements at one length, by label."""
        return {label: cell for label in self.variants if (cell := self.cell(label, column))}

    def best(self, column: Column) -> tuple[Hashable, set[Hashable]]:
        """The label with the best score at a length, and the labels whose score is a tie with it at 95%."""
        cells = self.column(column)
        if not cells:
            return "", set()
        winner = max(cells, key=lambda label: cells[label].score)
        others = {label: cell for label, cell in cells.items() if label != winner and cells[winner].stderr is not None}
        return winner, {label for label, cell in others.items() if compare(cell, cells[winner]) == "tie"}


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


def arrange(records: Iterable[tuple[str, Hashable, Column, Record]]) -> list[Table]:
    """A table for each suite and source, from (suite, label, column, record), in the order of the records.

    Of several checkpoints of a label the latest counts; lengths that only others have are left out. Of repeated records
    the last counts: a task of lm_eval that was asked by itself and in a group has two. A record without a number, of a
    model that diverged, becomes a cell of NaN.
    """
    groups: dict[tuple[str, str], list[tuple[Hashable, Column, Record]]] = {}
    for suite, label, column, record in records:
        groups.setdefault((suite, source_of(record)), []).append((label, column, record))
    tables = []
    for (suite, source), found in groups.items():
        last_step: dict[Hashable, float] = {}
        for label, _, record in found:
            last_step[label] = max(last_step.get(label, 0.0), number(record, "step") or 0.0)
        columns: dict[Hashable, Column] = {}
        cells: dict[tuple[Hashable, Hashable], Cell] = {}
        for label, column, record in found:
            if columns.setdefault(column.key, column).length != column.length:
                columns[column.key] = Column(column.factor, None)  # training lengths differ: only the factor is common
            if (number(record, "step") or 0.0) == last_step[label]:
                cells[label, column.key] = measure(record) or Cell(math.nan, -math.inf, None, record)
        variants: dict[Hashable, Record] = {}
        for (label, _), cell in cells.items():
            variants.setdefault(label, cell.record)
        measured = tuple(column for key, column in columns.items() if any(key == at for _, at in cells))
        tables.append(Table(suite, source, measured, variants, cells))
    return tables


def with_shares(tables: Iterable[Table]) -> list[Table]:
    """The tables whose scores are shares of 1, which can be averaged."""
    numbers = [(table, [cell for cell in table.cells.values() if not math.isnan(cell.value)]) for table in tables]
    return [table for table, cells in numbers if cells and all(cell.share for cell in cells)]


def mean_cell(tables: Sequence[Table], label: Hashable, column: Column) -> Cell | None:
    """The mean of a variant's scores on different tasks, whose errors are independent; None if it lacks one."""
    cells = [cell for table in tables if (cell := table.cell(label, column)) and not math.isnan(cell.value)]
    if len(cells) < len(tables):
        return None
    value = math.fsum(cell.value for cell in cells) / len(cells)
    errors = [cell.stderr for cell in cells if cell.stderr is not None]
    stderr = math.hypot(*errors) / len(cells) if len(errors) == len(cells) else None
    ends = None if stderr is None else (value - Z95 * stderr, value + Z95 * stderr)
    samples = sum(number(cell.record, "samples") or 0.0 for cell in cells)
    return share_cell(value, stderr, cells[0].record | {"scores": {}, "samples": samples, "truncated": None}, ends)
