"""The one table of results: a row for each variant, run, arm or setting, and a column for each length, task or metric.

What is shown in a terminal, on the page, in a sweep, in a claim and in files is a `Table` of numbers with intervals, or
a `TextTable` of the words made of it.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pe_lab.results.formatting import percent, short_number, times
from pe_lab.results.records import Record, as_dict, number
from pe_lab.results.statistics import Z95, Difference, mean_of, over_seeds, paired, paired_t, with_holm


@dataclass(frozen=True)
class Cell:
    """One number.

    Attributes:
      value: the number to show.
      score: the number to compare: higher is better, and its errors are normal.
      stderr: of the score; None if it is not known.
      record: the result record.
      share: whether the value is a share of 1, shown in per cent.
      ends: the 95% interval of the value; None if it is not known.
      scores: the scores by seed or by sample that the score is the mean of, where they are known.
    """

    value: float
    score: float
    stderr: float | None
    record: Record = field(repr=False)
    share: bool = False
    ends: tuple[float, float] | None = None
    scores: Mapping[Hashable, float] = field(default_factory=dict, repr=False)

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


def share_cell(value: float, stderr: float | None, record: Record, ends: tuple[float, float] | None) -> Cell:
    """A cell of a share of 1, whose interval is cut to 0..1."""
    ends = None if ends is None else (max(ends[0], 0.0), min(ends[1], 1.0))
    return Cell(value, value, stderr, record, True, ends)


def seeds_cell(values: Mapping[Hashable, float], lower: bool = False) -> Cell:
    """The mean of numbers by seed, {seed: value}; `lower`: a lower one is better."""
    found, sign = over_seeds([*values.values()]), -1.0 if lower else 1.0
    ends = None if math.isnan(found.high) else (found.low, found.high)
    scores = {seed: sign * value for seed, value in values.items()}
    return Cell(found.mean, sign * found.mean, None, {"higher_is_better": not lower}, ends=ends, scores=scores)


def samples_cell(scores: Sequence[float], clusters: Sequence[Hashable]) -> Cell | None:
    """The mean of the scores in 0..1 of samples, and the cluster of each (`mean_of`); None of no scores."""
    found = mean_of(scores, clusters)
    if found is None:
        return None
    of_sample = {(cluster, n): score for n, (cluster, score) in enumerate(zip(clusters, scores, strict=True))}
    return Cell(
        found.mean, found.mean, found.stderr, {"samples": found.count}, True, (found.low, found.high), of_sample
    )


def is_prompted(record: Record) -> bool:
    """Whether a record is of a task that is asked with prompts: it names the metric of its score."""
    return isinstance(record.get("metric"), str) and "score" in record


def compare(ours: Cell, theirs: Cell) -> str:
    """`win`, `loss`, or `tie` if the difference is within 95% of the noise of both, as of independent scores."""
    difference = ours.score - theirs.score
    noise = Z95 * math.hypot(ours.stderr or 0.0, theirs.stderr or 0.0)
    if abs(difference) <= noise or difference == 0:
        return "tie"
    return "win" if difference > 0 else "loss"


def by_seed(ours: Cell, theirs: Cell) -> Difference | None:
    """The difference `ours - theirs` of scores in pairs of seeds, by Student's t test; None without a common seed."""
    both = [seed for seed in ours.scores if seed in theirs.scores]
    return paired_t(*([cell.scores[seed] for seed in both] for cell in (ours, theirs))) if both else None


def by_sample(ours: Cell, theirs: Cell) -> Difference | None:
    """The same of `samples_cell`s, on the samples of both, by the sign-flip test."""
    both = [sample for sample in ours.scores if sample in theirs.scores]
    scores = ([cell.scores[sample] for sample in both] for cell in (ours, theirs))
    return paired(*scores, [cluster for cluster, _ in both]) if both else None


# ---------------------------------------------------------------------------------------------------------------------
# Columns


@dataclass(frozen=True)
class Metric:
    """A column that is not a length: a task, a metric. Columns of equal `key` are the same column."""

    title: str

    @property
    def key(self) -> Any:
        return self.title


@dataclass(frozen=True)
class Length:
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
    def key(self) -> Any:
        return self.factor if self.factor is not None else float(self.length or 0)


@dataclass(frozen=True)
class Bucket(Length):
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


Column = Metric | Length


# ---------------------------------------------------------------------------------------------------------------------
# Tables


@dataclass(frozen=True)
class Table:
    """Numbers by row and column.

    Attributes:
      columns: lengths, tasks or metrics.
      rows: the label of each row, and what it is: a record of the variant, a setting, an arm.
      cells: by (label, column key).
      suite, source: what was measured, of a table of one suite on one source.
      skipped: how many records have no number or no length.
    """

    columns: tuple[Column, ...]
    rows: Mapping[Any, Any]
    cells: Mapping[tuple[Any, Any], Cell]
    suite: str = ""
    source: str = ""
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

    def column(self, column: Column) -> dict[Any, Cell]:
        """The measurements in one column, by label."""
        return {label: cell for label in self.rows if (cell := self.cell(label, column))}

    def best(self, column: Column) -> tuple[Hashable, set[Hashable]]:
        """The label with the best score in a column, and the labels whose score is a tie with it at 95%."""
        cells = self.column(column)
        if not cells:
            return "", set()
        winner = max(cells, key=lambda label: cells[label].score)
        others = {label: cell for label, cell in cells.items() if label != winner and cells[winner].stderr is not None}
        return winner, {label for label, cell in others.items() if compare(cell, cells[winner]) == "tie"}

    def differences(self, baseline: Hashable, column: Column) -> dict[Any, Difference]:
        """{label: the difference of its score from that of `baseline`, by seed}; p is corrected for all rows."""
        of = self.cell(baseline, column)
        cells = {label: cell for label, cell in self.column(column).items() if label != baseline}
        known = {label: by_seed(cell, of) for label, cell in cells.items()} if of else {}
        return with_holm({label: one for label, one in known.items() if one is not None})

    def without(self, keys: Iterable[Hashable]) -> Table:
        """The table without the columns of these keys, and without the rows that have no other."""
        gone = set(keys)
        if not gone:
            return self
        cells = {at: cell for at, cell in self.cells.items() if at[1] not in gone}
        labels = {label for label, _ in cells}
        rows = {label: row for label, row in self.rows.items() if label in labels}
        columns = tuple(column for column in self.columns if column.key not in gone)
        return replace(self, columns=columns, cells=cells, rows=rows)


def seeds_table(values: Mapping[Any, Mapping[str, Mapping[Any, float]]], higher: Iterable[str] = ()) -> Table:
    """The table of {row: {metric: {seed: value}}}; of the metrics in `higher`, a higher value is better."""
    better, metrics = set(higher), dict.fromkeys(metric for found in values.values() for metric in found)
    cells = {
        (label, metric): seeds_cell(by_seed, metric not in better)
        for label, found in values.items()
        for metric, by_seed in found.items()
        if by_seed
    }
    return Table(tuple(map(Metric, metrics)), {label: label for label in values}, cells)


def with_shares(tables: Iterable[Table]) -> list[Table]:
    """The tables whose scores are shares of 1, which can be averaged."""
    numbers = [(table, [cell for cell in table.cells.values() if not math.isnan(cell.value)]) for table in tables]
    return [table for table, cells in numbers if cells and all(cell.share for cell in cells)]


def mean_cell(tables: Sequence[Table], label: Hashable, column: Column) -> Cell | None:
    """The mean of a row's scores on different tasks, whose errors are independent; None if it lacks one."""
    cells = [cell for table in tables if (cell := table.cell(label, column)) and not math.isnan(cell.value)]
    if len(cells) < len(tables):
        return None
    value = math.fsum(cell.value for cell in cells) / len(cells)
    errors = [cell.stderr for cell in cells if cell.stderr is not None]
    stderr = math.hypot(*errors) / len(cells) if len(errors) == len(cells) else None
    ends = None if stderr is None else (value - Z95 * stderr, value + Z95 * stderr)
    samples = sum(number(cell.record, "samples") or 0.0 for cell in cells)
    return share_cell(value, stderr, cells[0].record | {"scores": {}, "samples": samples, "truncated": None}, ends)


# ---------------------------------------------------------------------------------------------------------------------
# Texts


@dataclass(frozen=True)
class TextTable:
    """A table of texts: the first `words` columns are words, the others numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: int = 1

    @property
    def markdown(self) -> str:
        """The table as Markdown, without its title."""
        escaped = [[cell.replace("|", "\\|") for cell in row] for row in (self.header, *self.rows)]
        lines = [f"| {' | '.join(row)} |" for row in escaped]
        return "\n".join([lines[0], "|" + "---|" * len(self.header), *lines[1:]])


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(rows)
    return written.getvalue()


def with_half(mean: float, high: float | None, form: str, form_of_half: str) -> str:
    """`3.1 ± 0.2`; without the interval where it is not known."""
    half = "" if high is None or math.isnan(high) else f" ± {high - mean:{form_of_half}}"
    return f"{mean:{form}}{half}"
